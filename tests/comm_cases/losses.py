"""Losses over a communicator: written in plain single-process style, and this library's."""

from __future__ import annotations

from contextlib import ExitStack
from unittest.mock import patch

import torch
from compare import assert_same
from loss_cases import CORE, LOSSES, dense, gradients, rows_of, whole_batch
from torch.nn import functional as F

import wholebatch as wb
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.partition import Partition

from .registry import case, refused, same_on_all, splits, summed, with_settings


def clip(gather, x, y, scale):
    x, y = gather(F.normalize(x, dim=1)), gather(F.normalize(y, dim=1))
    logits, labels = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def simclr(gather, x, y, temperature):
    z = torch.cat([gather(F.normalize(x, dim=1)), gather(F.normalize(y, dim=1))])
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


def barlow_twins(total, x, y, weight):
    """Return the loss from the cross-correlation of batch-normalized features; `total` sums over the batch's rows."""
    n = total(torch.ones(len(x), 1, dtype=x.dtype))

    def standardized(z):
        centered = z - total(z) / n
        return centered / (total(centered.square()) / n).sqrt()

    correlation = total(torch.einsum("ni,nj->nij", standardized(x), standardized(y))) / n
    diagonal = correlation.diagonal()
    return (diagonal - 1).square().sum() + weight * (correlation.square().sum() - diagonal.square().sum())


@case
def losses_in_plain_style(comm):
    """Losses of a user, written with these operations, have the gradients of one process, in both conventions."""
    for counts in splits(comm.size):
        if sum(counts) < 2:
            continue
        data = same_on_all(comm, (2, sum(counts), 4), torch.float64)
        rows = Partition(tuple(counts)).rows(comm.rank)
        for loss_fn, gathers in ((clip, True), (simclr, True), (barlow_twins, False)):
            # Barlow Twins subtracts the batch's mean from the local rows. The result differs between ranks, so
            # "replicated" does not hold there, and its gradient is wrong.
            scale = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
            x, y = (t.clone().requires_grad_() for t in data)
            single = (lambda t: t) if gathers else (lambda t: t.sum(0))
            expected = loss_fn(single, x, y, scale)
            expected.backward()
            for convention in ("sum", "replicated"):
                ours = with_settings(comm, loss=convention)
                together = ours.all_gather if gathers else lambda t, ours=ours: ours.all_reduce(t.sum(0))
                local = [t[rows].clone().requires_grad_() for t in data]
                own_scale = scale.detach().clone().requires_grad_()
                loss = loss_fn(together, *local, own_scale)
                assert_same(loss, expected, relative=1e-12, what=loss_fn.__name__)
                loss.backward()
                # Every rank computed the same loss: their sum is W times it.
                factor = comm.size if convention == "sum" else 1
                largest = torch.stack(
                    [
                        (mine.grad - factor * whole.grad[rows]).abs().amax()
                        for mine, whole in zip(local, (x, y), strict=True)
                    ]
                    if counts[comm.rank]
                    else [torch.zeros(1)]
                ).amax()
                error = comm.all_reduce(largest.double().reshape(()), "max").item()
                if gathers or convention == "sum" or comm.size == 1:
                    assert error < 1e-10 * factor, (loss_fn.__name__, convention, error)
                else:
                    assert error > 1e-2, "the test can detect it"
                assert_same(own_scale.grad, scale.grad, relative=1e-10)


@case
def losses_of_this_library(comm):
    """CLIPLoss and WholeBatch take any communicator."""
    for counts in splits(comm.size):
        rows = Partition(tuple(counts)).rows(comm.rank)
        data = same_on_all(comm, (2, sum(counts), 4), torch.float64)
        x, y = (t.clone().requires_grad_() for t in data)
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        expected = wb.reference.clip_loss(x, y, scale)
        expected.backward()
        roots = [{"strategy": "root", "root": root} for root in range(comm.size)]
        losses = [
            wb.CLIPLoss(group=comm, sync=None),
            *(
                wb.WholeBatch(wb.reference.clip_loss, group=comm, sync=None, **options)
                for options in ({"strategy": "gather"}, {"strategy": "replicate"}, *roots)
            ),
        ]
        for loss_fn in losses:
            local = [t[rows].clone().requires_grad_() for t in data]
            own_scale = scale.detach().clone().requires_grad_()
            loss = loss_fn(*local, own_scale)
            loss.backward()
            assert_same(loss, expected, relative=1e-12, what=str(loss_fn))
            for mine, whole in zip(local, (x, y), strict=True):
                assert_same(mine.grad, whole.grad[rows], relative=0, absolute=1e-12, what=str(loss_fn))
            assert_same(summed(comm, own_scale.grad)[0], scale.grad, relative=1e-10, what=str(loss_fn))


@case
def flat_losses_and_their_exchanges(comm):
    """Every loss gathers and rings over any communicator: uneven rows, empty ranks, a user's messages in between."""
    scale = torch.tensor(7.0, dtype=torch.float64)
    # Without tags, a message that is on its way stands in the way of those of a loss.
    crossing = comm.transport.keeps_tags(scale)
    for counts in splits(comm.size):
        for name in [*CORE, "clip, ids, weights", "sup_con", "triplet", "matryoshka"]:
            loss = LOSSES[name]
            whole = whole_batch(loss, tuple(counts))
            expected = dense(loss, whole, 7.0)
            local = [z[at] for z, at in zip(whole, rows_of(loss, tuple(counts), comm.rank), strict=True)]
            for exchange in USED_EXCHANGES:
                if crossing:
                    with torch.no_grad():
                        message = comm.isend(torch.ones(2), (comm.rank + 1) % comm.size)
                actual = gradients(loss, wb.functional, local, scale, group=comm, sync=None, exchange=exchange)
                if crossing:
                    with torch.no_grad():
                        comm.recv(torch.empty(2), (comm.rank - 1) % comm.size)
                    message.wait()
                what = f"{name} {exchange} {counts}"
                assert_same(actual[0], expected[0], relative=1e-12, absolute=1e-12, what=what)
                features = rows_of(loss, tuple(counts), comm.rank)
                for place, position in enumerate(loss.differentiable, start=1):
                    got, true, at = actual[place], expected[place], features[position]
                    size = true.abs().max().item() if true.numel() else 0.0
                    assert_same(got, true[at], relative=0, absolute=1e-11 * size + 1e-14, what=what)


@case
def losses_differentiated_in_another_order(comm):
    """All ranks raise over any transport, and continue; the same holds for incoming gradients that differ."""
    if comm.size == 1:
        return
    x = F.normalize(torch.randn(3, 4, dtype=torch.float64), dim=1).requires_grad_()
    for exchange in USED_EXCHANGES:
        options = {"group": comm, "exchange": exchange}
        losses = [wb.functional.clip_loss(x, x, 2.0, **options), wb.functional.nt_xent_loss(x, x, **options)]
        with refused(r"the same calls.*backward of (clip|nt_xent)_loss #\d+.*in the same order on all ranks, or add"):
            losses[comm.rank == 0].backward()
        loss = wb.functional.clip_loss(x, x, 2.0, **options)
        with refused(r"backward of clip_loss #\d+: the incoming gradient must be the same on all ranks, got \["):
            (loss * (1 + comm.rank)).backward()
        wb.functional.clip_loss(x, x, 2.0, **options).backward()
        assert x.grad.isfinite().all()


@case
def what_moves_in_the_backward_pass(comm):
    """Compare the strategies: "replicate" moves nothing, and the adjoints of a replicated loss move nothing."""
    x = torch.randn(4, 3, dtype=torch.float64)
    moved, inside = [], []
    operations = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "all_to_all")

    def spy(name):
        original = getattr(comm.transport, name)

        def call(*args):
            if not inside:
                moved.append((sum(args[1]), sum(args[2])) if name == "all_to_all" else name)
            inside.append(name)
            try:
                return original(*args)
            finally:
                inside.pop()

        return patch.object(comm.transport, name, call)

    def backward_of(loss):
        with ExitStack() as spies:
            for name in (*operations, "all_gather_statements"):
                spies.enter_context(spy(name))
            moved.clear()
            loss.backward()
        return list(moved)

    together = ["all_gather_statements"] if comm.size > 1 else []  # all ranks are in the same backward pass
    for strategy, expected in (
        ("gather", [*together, "reduce_scatter"]),
        ("replicate", []),
        ("root", [*together, (0 if comm.rank else 4 * comm.size, 4)]),  # rows that are sent, and received: a scatter
    ):
        local = x.clone().requires_grad_()
        loss = wb.WholeBatch(lambda z: z.square().sum(), group=comm, strategy=strategy)(local)
        assert backward_of(loss) == expected, strategy
        assert not wb.WholeBatch(lambda z: z.square().sum(), group=comm, strategy=strategy)(x).requires_grad
    comm.loss = "replicated"
    for operation in (comm.all_gather, comm.all_reduce, comm.broadcast):
        handshakes = backward_of(operation(x.clone().requires_grad_()).sum())
        assert not handshakes
    comm.loss = "sum"
    assert not comm._order.waiting()
