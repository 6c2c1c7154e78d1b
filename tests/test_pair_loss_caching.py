"""Declared losses with gradient caching under DDP: encoders and the loss's own parameters get the dense gradient."""

import pytest
import torch
import torch.distributed as dist
from declared import different, same
from pair_losses import cut
from torch import nn
from torch.nn.functional import softplus
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.testing import run_ranks


def learned_loss():
    terms = {
        "far": wb.terms.LogSumExp(lambda s, x, y, p: -p.alpha * s, where=same),
        "near": wb.terms.LogSumExp(lambda s, x, y, p: p.alpha * s, where=different),
    }
    alpha = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    return wb.PairLoss(
        terms,
        lambda r, x, p: softplus(r.far, threshold=40) + softplus(r.near, threshold=40),
        similarity="cosine",
        parameters={"alpha": alpha},
    )


def encoder():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def data():
    made = torch.Generator().manual_seed(0)
    return torch.randn(10, 6, generator=made, dtype=torch.float64), torch.randint(0, 3, (10,), generator=made)


def cached_on(counts):
    x, labels = data()
    at = cut(counts, dist.get_rank())
    model, loss_fn = DistributedDataParallel(encoder()), learned_loss()
    loss = wb.GradCache([model], 3, loss_fn)(x[at], x_data={"label": labels[at]})
    return loss.detach(), [p.grad for p in model.parameters()], loss_fn.values.alpha.grad


@pytest.mark.parametrize("counts", [(10,), (6, 4), (1, 9)], ids=str)
def test_a_declared_loss_is_cached_like_any_other(counts):
    x, labels = data()
    model, loss_fn = encoder(), learned_loss()
    loss = loss_fn.reference(model(x), x_data={"label": labels})
    loss.backward()
    for value, grads, alpha in run_ranks(cached_on, len(counts), counts):
        assert torch.isclose(value, loss.detach(), rtol=1e-12)
        for grad, p in zip(grads, model.parameters(), strict=True):
            assert torch.allclose(grad, p.grad, rtol=1e-10, atol=1e-12)
        assert torch.isclose(alpha, loss_fn.values.alpha.grad, rtol=1e-10)
    alone = torch.stack([loss_fn.reference(model(x[:6]), x_data={"label": labels[:6]}), loss])
    assert abs(alone[0] - alone[1]) > 1e-3  # the loss of a part is another
