"""WholeBatch is exact on losses of all kinds, by both strategies: parameters inside, tensors by keyword, labels."""

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


class LabeledLoss(nn.Module):
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
    model, loss_fn, margin = encoder(), LabeledLoss(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    expected = loss_fn(model(images), labels, margin=margin)
    expected.backward()
    reference = {**dict(model.named_parameters()), **dict(loss_fn.named_parameters())}
    reference = {name: parameter.grad for name, parameter in reference.items()}

    class Together(nn.Module):
        """Encoder and loss inside one DDP, which averages all their parameters."""

        def __init__(self, strategy):
            super().__init__()
            self.encoder = encoder()
            self.loss = wb.WholeBatch(LabeledLoss(), strategy=strategy)

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
    """Pass one tensor twice, a scalar temperature third, and another object fourth."""
    x_full = torch.randn(5, 3, dtype=torch.float64)
    rows = Partition((2, 3)).rows(dist.get_rank())

    def loss_fn(a, b, temperature, kind):
        assert kind == "cosine"
        return (a @ b.T / temperature).logsumexp(1).mean()

    for strategy in STRATEGIES:
        whole = x_full.clone().requires_grad_()
        loss_fn(whole, whole, torch.tensor(0.5), "cosine").backward()
        local = x_full[rows].clone().requires_grad_()
        temperature = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        wb.WholeBatch(loss_fn, strategy=strategy, sync=None)(local, local, temperature, "cosine").backward()
        assert_same(local.grad, whole.grad[rows], relative=1e-10)


def test_a_tensor_may_be_passed_twice_beside_arguments_without_rows():
    run_ranks(shared_body, 2)


def gradient_penalty_body():
    """Differentiate the strategy "gather" again, by a penalty on the loss's gradient."""
    x_full = torch.randn(4, 3, dtype=torch.float64)
    rows = Partition((1, 3)).rows(dist.get_rank())

    def penalty(x, loss_fn):
        (gradient,) = torch.autograd.grad(loss_fn(x), x, create_graph=True)
        return gradient

    whole = x_full.clone().requires_grad_()
    penalty(whole, lambda z: (z @ z.T).logsumexp(1).sum()).square().sum().backward()
    local = x_full[rows].clone().requires_grad_()
    loss = wb.WholeBatch(lambda z: (z @ z.T).logsumexp(1).sum(), sync="sum")
    penalty(local, loss).square().sum().backward()
    assert_same(local.grad, whole.grad[rows], relative=1e-10)


def test_gather_can_be_differentiated_twice():
    run_ranks(gradient_penalty_body, 2)


class Scaled(nn.Module):
    """A loss whose parameter may also reach it from outside."""

    def __init__(self):
        super().__init__()
        self.log_t = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, z, scale=1.0, other=1.0):
        self.calls += 1
        return (self.log_t.exp() * scale * other * z @ z.T).logsumexp(1).mean()


def root_parameters_body():
    """A parameter that reaches the loss by several routes counts once for each; buffers follow the root."""
    rows = Partition((2, 3)).rows(dist.get_rank())
    data_full = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    routes = {
        "twice by keyword": lambda t, m: {"scale": t, "other": t},
        "the module's": lambda t, m: {"scale": m.log_t},
        "derived from the module's": lambda t, m: {"scale": 2 * m.log_t, "other": m.log_t.exp()},
    }
    for what, route in routes.items():
        gradients = {}
        for strategy in ("gather", "root", "dense"):
            module, t = Scaled(), torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            local = (data_full if strategy == "dense" else data_full[rows]).clone().requires_grad_()
            if strategy == "dense":
                module(local, **route(t, module)).backward()
            else:
                wb.WholeBatch(module, strategy=strategy, root=1, sync="mean")(local, **route(t, module)).backward()
                assert module.calls.item() == 1, "on every rank"
            gradients[strategy] = [x.grad for x in (module.log_t, t) if x.grad is not None]
        for strategy in ("gather", "root"):
            for ours, dense in zip(gradients[strategy], gradients["dense"], strict=True):
                assert_same(ours, dense, relative=1e-10, what=f"{strategy}, {what}")


def test_parameters_that_reach_a_loss_by_several_routes_count_once_for_each():
    run_ranks(root_parameters_body, 2)


def root_limits_body():
    """Test half precision under a gradient scaler, hidden parameters, evaluation, and freeing of memory."""
    x = torch.randn(4, 8).half().requires_grad_()
    gradients = {}
    for strategy in ("gather", "root"):
        x.grad = None
        loss = wb.WholeBatch(lambda z: (z.float() @ z.float().T).logsumexp(1).mean() * 1e-3, strategy=strategy)(x)
        (loss * 65536).backward()
        gradients[strategy] = x.grad.float()
    assert gradients["root"].isfinite().all()
    assert_same(gradients["root"], gradients["gather"], relative=2e-3)

    hidden = torch.ones(8, requires_grad=True)
    frozen = x.detach().float()
    for rows in (frozen, frozen.clone().requires_grad_()):
        with pytest.raises(ValueError, match=r"depends on a parameter of shape \(8,\) that it was not given"):
            wb.WholeBatch(lambda z: (z * hidden).sum(), strategy="root")(rows)
    modes = []
    evaluate = wb.WholeBatch(lambda z: modes.append(torch.is_grad_enabled()) or (z * hidden).sum(), strategy="root")
    with torch.no_grad():
        evaluate(frozen.requires_grad_())
    assert modes == ([False] if dist.get_rank() == 0 else [])

    loss = wb.WholeBatch(lambda z: z.square().sum(), strategy="root")(frozen)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_root_in_half_precision_in_evaluation_and_with_hidden_parameters():
    run_ranks(root_limits_body, 2)


def only_gather_is_twice_differentiable_body():
    for strategy in ("replicate", "root"):
        x = torch.randn(3, 2, requires_grad=True)
        loss = wb.WholeBatch(lambda z: (z @ z.T).logsumexp(1).sum(), strategy=strategy)(x)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="can be differentiated once"):
            gradient.square().sum().backward()


def test_double_backward_is_refused_where_it_would_be_wrong():
    run_ranks(only_gather_is_twice_differentiable_body, 2)
