"""even=True: the same loss and gradients without a read on the host, and what a broken promise costs."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from strict_transport import strict
from test_host_sync import counted
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.comm.handshake import UnreadError, handshake_unread
from wholebatch.contract import even
from wholebatch.testing import run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 3e-5, torch.bfloat16: 2e-2}
RELATIVE = 1e-5
OPTIONS = {
    "plain": {},
    "ring": {"exchange": "ring"},
    "kept": {"memory": 2**20},
    "smoothed": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "rounded": {"precision": "bfloat16"},
}


@pytest.fixture(autouse=True)
def _nothing_promised(monkeypatch):
    monkeypatch.setattr("wholebatch.comm.local._KEPT", {})


def rows(count, seed, dtype=torch.float64, width=12):
    """Return pairs of unit rows that are neither random nor solved."""
    generator = torch.Generator().manual_seed(seed)
    x = normalize(torch.randn(count, width, dtype=torch.float64, generator=generator), dim=1)
    y = normalize(x + 0.3 * torch.randn(count, width, dtype=torch.float64, generator=generator), dim=1)
    return x.to(dtype), y.to(dtype)


def derivatives(loss, *leaves):
    return [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, leaves))]


def steps(dtype, scale, learned, options, *, count=5, each=6):
    """Return, for some steps, this rank's results with those of the dense float64 reference, and the steps unread."""
    rank, size = (torch.distributed.get_rank(), torch.distributed.get_world_size()) if in_group() else (0, 1)
    found, unread = [], 0
    mine = slice(rank * each, (rank + 1) * each)
    for step in range(count):
        whole = rows(each * size, step, dtype)
        x, y = (z[mine].clone().requires_grad_() for z in whole)
        weights = torch.linspace(0.5, 1.5, each * size, dtype=torch.float64)
        ids = torch.arange(each * size) // 2
        s = torch.tensor(scale + 0.01 * step, dtype=torch.float64, requires_grad=True) if learned else scale
        loss = wb.functional.clip_loss(
            x, y, s, sync=None, even=True, weights=weights[mine].to(dtype), ids=ids[mine], **options
        )
        unread += bool(unread_calls())
        got = derivatives(loss, x, y, *([s] if learned else []))
        if learned and size > 1:
            torch.distributed.all_reduce(got[-1])
        a, b = (z.double().requires_grad_() for z in whole)
        t = torch.tensor(scale + 0.01 * step * learned, dtype=torch.float64, requires_grad=True)
        same = {name: options[name] for name in ("label_smoothing", "reduction") if name in options}
        truth = derivatives(wb.reference.clip_loss(a, b, t, weights=weights, ids=ids, **same), a, b, t)
        truth[1:3] = [z[mine] for z in truth[1:3]]
        found.append((got, truth[: len(got)]))
    return found, unread


def unread_calls():
    """Return the calls of this process, or of its group, that the host has not read."""
    comm = wb.comm.TorchCommunicator() if in_group() else wb.comm.LocalCommunicator()
    return even.unread(comm.transport)


def in_group():
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def assert_right(results, dtype, rounded=False):
    found, unread = results
    assert unread == len(found) - 1, "all calls but the first leave their facts unread"
    for got, truth in found:
        for a, b in zip(got, truth, strict=True):
            assert (a - b).norm() <= (2e-2 if rounded else TOLERANCE[dtype]) * b.norm()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("scale", [14.3, 100.0])
@pytest.mark.parametrize("dtype", [*TOLERANCE])
def test_one_process_computes_the_same(dtype, scale, learned):
    assert_right(steps(dtype, scale, learned, {}), dtype)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_compute_the_same(size):
    for of_rank in run_ranks(ranks_body, size, timeout_s=120):
        for name, results in of_rank.items():
            assert_right(results, torch.float64, rounded="rounded" in name)


def ranks_body():
    found = {}
    for name, options in OPTIONS.items():
        even.forget(wb.comm.TorchCommunicator().transport)
        even.read_late(wb.comm.TorchCommunicator().transport)
        dtype = torch.float32 if name == "rounded" else torch.float64
        found[name] = steps(dtype, 14.3, True, options)
        even.read_late(wb.comm.TorchCommunicator().transport)
    return found


def test_kernels_take_rows_that_are_scaled(monkeypatch):
    pytest.importorskip("triton")
    found, unread = steps(torch.float32, 14.3, True, {"kernel": "triton", "precision": "bfloat16"}, count=4)
    assert unread >= 2, "a call that has just chosen its kernels is read once more"
    for got, truth in found:
        for a, b in zip(got, truth, strict=True):
            assert (a - b).norm() <= 2e-2 * b.norm()


@pytest.mark.parametrize("size", [1, 2])
def test_the_host_reads_nothing(size):
    """As on NCCL; the same calls without the promise are read, so the test sees reads."""
    for promised, not_promised in run_ranks(strict_body, size, timeout_s=120):
        assert promised[1:] == [0, 0, 0]
        assert min(not_promised) > 0


def strict_body():
    found = []
    with pytest.MonkeyPatch.context() as patch:
        strict(patch)
        for promise in (True, False):
            of_steps = []
            for step in range(4):
                x, y = (z.requires_grad_() for z in rows(6, step, torch.float32))
                s = torch.tensor(14.3, requires_grad=True)
                with counted() as reads:
                    wb.functional.clip_loss(x, y, s, even=promise, memory="flat").backward()
                of_steps.append(len(reads))
            found.append(of_steps)
    return tuple(found)


MISTAKES = {
    "nan": "largest norm of image_features of rank 1 was nan; check for an overflow",
    "fewer rows": r"rank 1 passed other rows than before \(image_features: \[6, 4",
    "no rows": r"rank 1 passed other rows than before \(image_features: \[6, 0",
    "other scale": r"logit_scale must be the same on all ranks, got \[14.3\d*, 15.0",
    "negative weight": r"weights must not be negative, got -1.0",
}


@pytest.mark.parametrize("size", [2, 3])
def test_a_broken_promise_costs_one_step(size):
    for found in run_ranks(broken_body, size, timeout_s=180):
        for name, (loss, gradients, message, after) in found.items():
            assert loss != loss, name  # NaN
            assert gradients == 0.0, name
            assert message is not None, f"{name}: nothing was raised"
            assert re.search(MISTAKES[name], message), message
            assert after < 1e-9, name


def broken_body():
    found, rank = {}, torch.distributed.get_rank()
    for name in MISTAKES:
        steps(torch.float64, 14.3, True, {}, count=3)
        x, y = rows(6, rank)
        scale, weights = torch.tensor(14.3, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
        if rank == 1:
            x[0, 0] = torch.nan if name == "nan" else x[0, 0]
            keep = {"fewer rows": 4, "no rows": 0}.get(name, 6)
            x, y, weights = x[:keep], y[:keep], weights[:keep]
            scale = torch.tensor(15.0, dtype=torch.float64) if name == "other scale" else scale
            weights = -weights if name == "negative weight" else weights
        ids = torch.arange(6)[: len(x)]
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_(), scale.requires_grad_()]
        loss = wb.functional.clip_loss(*leaves, sync=None, even=True, ids=ids, weights=weights)
        loss.backward()
        largest = max(leaf.grad.abs().max().item() if leaf.numel() else 0.0 for leaf in leaves)
        message = None
        try:
            steps(torch.float64, 14.3, True, {}, count=1)
        except ValueError as error:
            message = str(error)
        results, _ = steps(torch.float64, 14.3, True, {}, count=2)
        away = max((a - b).norm().item() for got, truth in results for a, b in zip(got, truth, strict=True))
        found[name] = (loss.item(), largest, message, away)
        even.read_late(wb.comm.TorchCommunicator().transport)
    return found


def test_a_rank_in_another_call_raises_at_once():
    unread, message = run_ranks(other_body, 2, timeout_s=60)
    assert unread == "sent"
    assert "rank 0 did not wait for the facts of this call, because of even=True" in message


def other_body():
    comm = wb.comm.TorchCommunicator()
    if torch.distributed.get_rank() == 0:
        handshake_unread(comm.transport, {"rows": 3}, caller="clip_loss")
        return "sent"
    with pytest.raises(UnreadError) as caught:
        comm.handshake(lambda: {"rows": 3}, caller="siglip_loss")
    return str(caught.value)


def test_uneven_rows_are_refused():
    for message in run_ranks(uneven_body, 3, timeout_s=60):
        assert "even=True promises that all ranks pass the same number of rows" in message
        assert "[4, 5, 6]" in message


def uneven_body():
    x, y = rows(4 + torch.distributed.get_rank(), 0)
    with pytest.raises(ValueError, match="even=True") as caught:
        wb.functional.clip_loss(x, y, 10.0, even=True)
    return str(caught.value)


def test_calls_of_another_form_are_read():
    """Training and validation in turn, with other sizes: each first call of a form is a whole handshake."""
    for count, grad in ((6, True), (6, True), (5, False), (5, False), (6, True), (6, True)):
        x, y = rows(count, 0)
        with torch.set_grad_enabled(grad):
            got = wb.functional.clip_loss(x.requires_grad_(grad), y, 10.0, even=True)
        assert_same(got.detach(), wb.reference.clip_loss(x, y, 10.0).detach(), relative=RELATIVE)


def test_a_scale_that_grows_costs_one_step_and_a_warning():
    steps(torch.float64, 14.3, True, {}, count=2)
    x, y = rows(6, 0)
    x.requires_grad_()
    weights, ids = torch.ones(6, dtype=torch.float64), torch.arange(6)

    def step():
        scale = torch.tensor(90.0, dtype=torch.float64, requires_grad=True)
        return wb.functional.clip_loss(x, y.requires_grad_(), scale, sync=None, even=True, weights=weights, ids=ids)

    loss = step()
    assert loss.isnan()
    assert not torch.autograd.grad(loss, x)[0].any()
    with pytest.warns(UserWarning, match=r"logit_scale grew to 90 in a call, and 24\.\d* was assumed"):
        loss = step()
    assert_same(loss.detach(), wb.reference.clip_loss(x, y, 90.0).detach(), relative=RELATIVE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(step().detach(), loss.detach(), relative=RELATIVE)


def test_sums_that_underflow_are_found_on_the_device():
    """At scale 300, all logits of a row may be -300: under one shift for all, its sum is 0."""
    x, y = (z.float() for z in rows(6, 0))
    opposite = -x[:1].expand(6, -1).clone()
    same = x[:1].expand(6, -1).clone().requires_grad_()
    wb.functional.clip_loss(x.clone().requires_grad_(), y, 300.0, even=True)
    loss = wb.functional.clip_loss(same, opposite, 300.0, even=True)
    assert loss.isnan()
    assert not torch.autograd.grad(loss, same)[0].any()
    with pytest.raises(ValueError, match="so low that their sum underflowed"):
        wb.functional.clip_loss(x, y, 300.0, even=True)
    read = wb.functional.clip_loss(same, opposite, 300.0)
    assert_same(
        read.detach().double(),
        wb.reference.clip_loss(same.double(), opposite.double(), 300.0).detach(),
        relative=RELATIVE,
    )


def test_long_rows_are_read():
    """Where logits may exceed 66 and rows are not normalized, no bound is assumed, and each call is read."""
    x, y = rows(6, 0)
    found = []
    for length in (1.0, 1.0, 7.0, 7.0, 7.0, 1.0, 1.0):
        loss = wb.functional.clip_loss(length * x, length * y, 2.0, even=True, memory="flat")
        found.append(bool(unread_calls()))
        if not loss.isnan():
            assert_same(loss, wb.reference.clip_loss(length * x, length * y, 2.0), relative=RELATIVE)
        if len(found) == 3:
            assert loss.isnan(), "norms grew from 1 to 7, and 1.6 was assumed"
            with pytest.warns(UserWarning, match="largest norm of image_features grew to 7"):
                even.read_late(wb.comm.LocalCommunicator().transport)
    assert found == [False, True, True, False, False, False, True]


def test_even_must_be_a_flag():
    x, y = rows(6, 0)
    with pytest.raises(ValueError, match="even must be True or False, got 'yes'"):
        wb.functional.clip_loss(x, y, 10.0, even="yes")
    with pytest.raises(ValueError, match="even must be True or False, got 1"):
        wb.CLIPLoss(even=1)


def on_one_rank_body():
    """A rank that promises alone raises with the others, and does not leave them waiting."""
    rank = dist.get_rank()
    x, y = rows(3 + rank, rank)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"even must be the same on all ranks") as caught:
            wb.functional.clip_loss(x, y, 10.0, even=rank == 1)
    wb.functional.clip_loss(x, y, 10.0)
    return str(caught.value)


def test_a_promise_of_one_rank_raises_on_all():
    assert len({*run_ranks(on_one_rank_body, 2, timeout_s=60)}) == 1
