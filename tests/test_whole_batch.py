"""WholeBatch on losses of all kinds: parameters inside, tensors by keyword, labels; both strategies, exactly."""

import pytest
import torch
import torch.distributed as dist
from cases import SHARDS
from compare import assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.losses.whole_batch import STRATEGIES
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


class LabelledLoss(nn.Module):
    """A supervised contrastive loss with a temperature and a projection inside, a margin by keyword."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
        self.project = nn.Linear(5, 5, bias=False).double()
        nn.init.orthogonal_(self.project.weight, generator=torch.Generator().manual_seed(3))

    def forward(self, z, labels, *, margin):
        z = F.normalize(self.project(z), dim=-1)
        logits = self.log_scale.exp() * z @ z.T - margin * torch.eye(len(z), dtype=z.dtype)
        same = (labels[:, None] == labels).double()
        return -(same * logits.log_softmax(1)).sum() / same.sum()


def encoder():
    linear = nn.Linear(4, 5).double()
    nn.init.normal_(linear.weight, generator=torch.Generator().manual_seed(2))
    nn.init.zeros_(linear.bias)
    return linear


def data(rows):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 4, dtype=torch.float64, generator=generator), torch.arange(rows) % 3


def body(counts):
    rows = Partition(counts).rows(dist.get_rank())
    images, labels = data(sum(counts))
    model, loss_fn, margin = encoder(), LabelledLoss(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    expected = loss_fn(model(images), labels, margin=margin)
    expected.backward()
    reference = {**dict(model.named_parameters()), **dict(loss_fn.named_parameters())}
    reference = {name: parameter.grad for name, parameter in reference.items()}

    class Together(nn.Module):
        """Encoder and loss inside one DDP, as its parameters all want averaging."""

        def __init__(self, strategy):
            super().__init__()
            self.encoder = encoder()
            self.loss = wb.WholeBatch(LabelledLoss(), strategy=strategy)

        def forward(self, images, labels, margin):
            return self.loss(self.encoder(images), labels, margin=margin)

    for strategy in STRATEGIES:
        together = DistributedDataParallel(Together(strategy))
        own_margin = margin.detach().clone().requires_grad_()
        loss = together(images[rows], labels[rows], own_margin)
        loss.backward()
        assert_same(loss, expected, relative=1e-12, what=strategy)
        for name, parameter in together.module.named_parameters():
            assert_same(
                parameter.grad, reference[name.split(".", 1)[1].removeprefix("loss_fn.")], relative=1e-10, what=name
            )
        assert_same(own_margin.grad, margin.grad, relative=1e-10, what="margin: in full on every rank")


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_parameters_inside_the_loss(counts):
    run_ranks(body, len(counts), counts)


def shared_body():
    """One tensor in two places, a temperature of no dimension in third, something else in fourth."""
    x_full = torch.randn(5, 3, dtype=torch.float64)
    rows = Partition((2, 3)).rows(dist.get_rank())

    def loss_fn(a, b, temperature, kind):
        assert kind == "cosine"
        return (a @ b.T / temperature).logsumexp(1).mean()

    for strategy in STRATEGIES:
        whole = x_full.clone().requires_grad_()
        loss_fn(whole, whole, torch.tensor(0.5), "cosine").backward()
        own = x_full[rows].clone().requires_grad_()
        temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        wb.WholeBatch(loss_fn, strategy=strategy, sync=None)(own, own, temperature, "cosine").backward()
        assert_same(own.grad, whole.grad[rows], relative=1e-10)


def test_one_tensor_twice_and_arguments_without_rows():
    run_ranks(shared_body, 2)


def gradient_penalty_body():
    """The strategy "gather" can be differentiated again: a penalty on the loss's own gradient."""
    x_full = torch.randn(4, 3, dtype=torch.float64)
    rows = Partition((1, 3)).rows(dist.get_rank())

    def penalty(x, loss_fn):
        (gradient,) = torch.autograd.grad(loss_fn(x), x, create_graph=True)
        return gradient

    whole = x_full.clone().requires_grad_()
    penalty(whole, lambda z: (z @ z.T).logsumexp(1).sum()).square().sum().backward()
    own = x_full[rows].clone().requires_grad_()
    loss = wb.WholeBatch(lambda z: (z @ z.T).logsumexp(1).sum(), sync="sum")
    penalty(own, loss).square().sum().backward()
    assert_same(own.grad, whole.grad[rows], relative=1e-10)


def test_double_backward():
    run_ranks(gradient_penalty_body, 2)
