"""Small batches are computed as one tile: the same loss and gradients, in less than half of the operations."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from compare import assert_same
from test_collectives import counted
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.nodes.one_tile import OneTile
from wholebatch.testing import run_ranks

F = wb.functional
statistics = import_module("wholebatch.nodes.row_statistics")  # the package has a function of this name


class Counting(TorchDispatchMode):
    """Count the operators of aten."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def taken(monkeypatch):
    """Return a list that grows with each call of the node."""
    calls = []
    node = SimpleNamespace(apply=lambda *args: (calls.append(args[0]), OneTile.apply(*args))[1])
    monkeypatch.setattr(statistics, "OneTile", node)
    return calls


def inputs(rows, dtype=torch.float64, width=12):
    torch.manual_seed(rows)
    x, y = (normalize(torch.randn(rows, width, dtype=dtype), dim=1).requires_grad_() for _ in range(2))
    return x, y, torch.tensor(8.0, dtype=dtype, requires_grad=True)


def near(x, of):
    """Return rows near the first of x: at a scale of 800 their logits need a shift, and compete."""
    return normalize(x[:1] + 0.05 * of, dim=1)


def declared(x, y, scale, **sides):
    """Return the cross-entropies of pairs, whose statistics are combined by user functions."""
    terms = {
        "all": wb.terms.LogSumExp(lambda s, x, y, p: s * p.scale),
        "own": wb.terms.Partner(lambda s, x, y, p: s * p.scale),
    }
    return wb.PairLoss(terms, lambda r, x, p: r.all - r.own, **sides)(x, y, parameters={"scale": scale})


def declared_clip(f, x, y, scale):
    if f is wb.reference:
        return 2 * f.clip_loss(x, y, scale)
    return declared(x, y, scale, column_loss=lambda r, y, p: r.all - r.own)


def declared_info_nce(f, x, y, scale):
    return f.info_nce_loss(x, y, logit_scale=scale) if f is wb.reference else declared(x, y, scale)


CALLS = {
    "clip": lambda f, x, y, scale: f.clip_loss(x, y, scale),
    "clip, weights": lambda f, x, y, scale: f.clip_loss(x, y, scale, weights=torch.linspace(1, 0, len(x)).to(x)),
    "clip, sum": lambda f, x, y, scale: f.clip_loss(x, y, scale, reduction="sum"),
    "clip, shifted": lambda f, x, y, scale: f.clip_loss(near(x, x), near(x, y), 100 * scale),
    "info_nce": lambda f, x, y, scale: f.info_nce_loss(x, y, logit_scale=scale),
    "declared clip": declared_clip,
    "declared clip, shifted": lambda f, x, y, scale: declared_clip(f, near(x, x), near(x, y), 100 * scale),
    "declared info_nce": declared_info_nce,
}


@pytest.mark.parametrize("rows", [1, 2, 7, 50])
@pytest.mark.parametrize("name", CALLS)
def test_loss_and_gradients_are_those_of_the_dense_formula(name, rows, taken):
    x, y, scale = inputs(rows)
    found, expected = (CALLS[name](f, x, y, scale) for f in (F, wb.reference))
    assert len(taken) == 1
    assert_same(found, expected, relative=1e-12, absolute=1e-13)
    gradients = [torch.autograd.grad(loss, (x, y, scale), retain_graph=True) for loss in (found, expected, found)]
    for one, true, again in zip(*gradients, strict=True):
        assert_same(one, true, relative=1e-10, absolute=1e-11)
        assert torch.equal(one, again), "the backward pass changes nothing that it kept"
    if rows > 1:
        wrong = torch.autograd.grad(2 * found, x, retain_graph=True)[0]
        with pytest.raises(AssertionError):
            assert_same(wrong, gradients[1][0], relative=1e-10, absolute=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_gradients_of_some_inputs_are_those_of_the_sweep(dtype, wanted, taken):
    given = inputs(33, torch.float32)
    tensors = [
        x.detach().to(dtype if x.dim() else torch.float32).requires_grad_(at in wanted) for at, x in enumerate(given)
    ]
    sides = []
    for memory in ("auto", "flat"):
        loss = F.clip_loss(*tensors, memory=memory)
        sides.append((loss.detach(), *torch.autograd.grad(loss, [tensors[at] for at in wanted])))
    assert len(taken) == 1
    for one, other in zip(*sides, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-2 if one.dtype == torch.bfloat16 else 2e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("factor", [1.0, 1e6])
def test_rounded_products_are_as_near_as_those_of_the_sweep(precision, factor, taken):
    """Also under a loss scaler, whose gradients do not fit into float16 but for their unit."""
    given = inputs(40, torch.float32, 64)
    true = [z.detach().double().requires_grad_() for z in given]
    expected = torch.autograd.grad(factor * wb.reference.clip_loss(*true), true)
    errors = []
    for memory in ("auto", "flat"):
        found = torch.autograd.grad(factor * F.clip_loss(*given, memory=memory, precision=precision), given)
        errors.append([(one - of).norm() / of.norm() for one, of in zip(found, expected, strict=True)])
    assert len(taken) == 1
    for one, other in zip(*errors, strict=True):
        assert one < 1.3 * other + 1e-4
        assert one < 0.02


def test_it_is_taken_only_where_it_computes_the_same(taken):
    x, y, scale = inputs(20)
    ids = torch.arange(20) // 2
    large = inputs(641, torch.float32)
    for call in (
        lambda: F.clip_loss(x, y, scale, memory="flat"),
        lambda: F.clip_loss(x, y, scale, memory=800),
        lambda: F.clip_loss(x, y, scale, label_smoothing=0.1),
        lambda: F.clip_loss(x, y, scale, ids=ids),
        lambda: F.clip_loss(x, y, scale, ids=ids, equal_ids="excluded"),
        lambda: F.clip_loss(x, -x, 1e4),  # one shift may underflow
        lambda: F.clip_loss(*large),  # more than one tile
        lambda: F.info_nce_loss(x, y, logit_scale=scale, negatives=y[:3]),
        lambda: F.nt_xent_loss(x, y, temperature=0.1),
    ):
        assert call().isfinite()
        assert not taken
    assert F.clip_loss(x, y, scale, memory=10**7).isfinite()
    assert len(taken) == 1


def test_a_gradient_of_its_gradient_is_refused(taken):
    x, y, scale = inputs(5)
    (gradient,) = torch.autograd.grad(F.clip_loss(x, y, scale), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        gradient.sum().backward()
    assert taken


def test_a_small_step_starts_less_than_half_of_the_sweeps_operations():
    """Views included; the entry and the reduction have about 30."""
    counts = []
    for memory in ("auto", "flat"):
        x, y, scale = inputs(32, torch.float32)
        with Counting() as seen:
            F.clip_loss(x, y, scale, memory=memory).backward()
        counts.append(seen.count)
    assert counts[0] <= 72 < 2 * counts[0] < counts[1]


def ranks_body(counts):
    """Compare loss and gradients with those of the sweep, and count the collectives of both."""
    comm, rank = wb.comm.TorchCommunicator(), torch.distributed.get_rank()
    seen, taken = counted(comm), []
    node = SimpleNamespace(apply=lambda *args: (taken.append(args[0]), OneTile.apply(*args))[1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "OneTile", node)
        for call in (
            F.clip_loss,
            lambda x, y, scale, **more: F.info_nce_loss(x, y, logit_scale=scale, **more),
            lambda x, y, scale, **more: declared(x, y, scale, column_loss=lambda r, y, p: r.all - r.own, **more),
        ):
            sides = []
            for memory in ("auto", "flat"):
                taken.clear(), seen.clear()
                x, y, scale = inputs(sum(counts), torch.float64)
                local = [z.detach().split(counts)[rank].requires_grad_() for z in (x, y)]
                loss = call(*local, scale, group=comm, memory=memory)
                loss.backward()
                sides.append((loss.detach(), scale.grad, *(z.grad for z in local)))
                assert len(taken) == (memory == "auto")
                sides[-1] += (dict(seen),)
            assert sides[0][-1] == sides[1][-1], "the same messages"
            for one, other in zip(sides[0][:-1], sides[1][:-1], strict=True):
                assert_same(one, other, relative=1e-12, absolute=1e-14)
        taken.clear()
        memory = "flat" if rank == 0 else "auto"  # the way is the same on all ranks, though this may differ
        assert call(*local, scale, group=comm, memory=memory).isfinite()
        assert not taken


@pytest.mark.parametrize("counts", [(5, 3), (4, 4, 4), (2, 0, 3)], ids=str)
def test_several_ranks_take_it_together(counts):
    run_ranks(ranks_body, len(counts), counts)
