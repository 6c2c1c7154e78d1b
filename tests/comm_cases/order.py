"""The backward pass runs the operations in one order on all ranks, for any order of autograd."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from compare import assert_same

from wholebatch.partition import Partition

from .registry import around, case, drop, receives_first, refused, same_on_all


@case
def chain_of_messages(comm):
    """Run isend, recv and wait on every rank: y_r = x_left^2 w_r, so dx_r = 2 x_r w_right."""
    right = (comm.rank + 1) % comm.size
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weights = [same_on_all(comm, 3, torch.float64, seed=r) for r in range(comm.size)]
    for _ in range(2):
        x.grad = None
        handle, y = around(comm, x, torch.empty(3, dtype=torch.float64))
        assert comm.wait(handle) is None
        comm.backward((y.square() * weights[comm.rank]).sum())
        assert_same(x.grad, 2 * x * weights[right], relative=1e-12)


@case
def token_around_a_ring(comm):
    """One rank's tensor visits all ranks; each multiplies by its local parameter; the loss is on the last rank."""
    size = comm.size
    parameter = torch.tensor(1.5 + comm.rank, dtype=torch.float64, requires_grad=True)
    start = torch.tensor([2.0, -1.0], dtype=torch.float64, requires_grad=True)
    y = start if comm.rank == 0 else comm.recv(torch.empty(2, dtype=torch.float64), comm.rank - 1)
    y = y * parameter
    if comm.rank + 1 < size:
        comm.send(y, comm.rank + 1)
        loss = None
    else:
        loss = y.sum()
    comm.backward(loss)
    product = torch.tensor([1.5 + r for r in range(size)], dtype=torch.float64).prod()
    assert_same(parameter.grad, product / parameter.detach() * start.detach().sum(), relative=1e-12)
    if comm.rank == 0:
        assert_same(start.grad, product.expand(2), relative=1e-12)


def branching(comm, x):
    """Make the same calls on every rank, then build each rank's loss from other results than its neighbors'."""
    everyone = comm.all_gather(x)
    mean = comm.all_reduce(x, "avg")
    shared = comm.broadcast(x.square(), comm.size - 1)
    handle = comm.iall_reduce(x.sin())
    if comm.rank % 3 == 0:
        loss = everyone.square().sum()
        handle.wait()
    elif comm.rank % 3 == 1:
        loss = (mean.exp() * handle.wait()).sum()
    else:
        handle.wait()
        loss = None  # this rank has no loss
    return loss if comm.rank + 1 < comm.size or loss is None else loss + shared.sum()


@case
def graphs_that_branch(comm):
    """Compare with the gradient of the sum of the ranks' losses on one process."""
    rows = [same_on_all(comm, 3, torch.float64, seed=r).requires_grad_() for r in range(comm.size)]
    stack = torch.stack(rows)
    losses = []
    for rank in range(comm.size):
        if rank % 3 == 0:
            loss = stack.square().sum()
        elif rank % 3 == 1:
            loss = (stack.mean(0).exp() * stack.sin().sum(0)).sum()
        else:
            continue
        losses.append(loss if rank + 1 < comm.size else loss + rows[-1].square().sum())
    sum(losses).backward()
    for _ in range(2):
        x = rows[comm.rank].detach().clone().requires_grad_()
        comm.backward(branching(comm, x))
        assert_same(x.grad, rows[comm.rank].grad, relative=1e-12)


@case
def a_dedicated_loss_rank(comm):
    """The last rank holds no rows, gathers and computes; the others have no loss; rank 0's rows are frozen."""
    root = comm.size - 1
    counts = [2] * root + [0] if root else [2]
    full = same_on_all(comm, (sum(counts), 3), torch.float64)
    whole = full.clone().requires_grad_()
    whole.exp().square().sum().sqrt().backward()
    rows = Partition(tuple(counts)).rows(comm.rank)
    x = full[rows].clone().requires_grad_(comm.rank != 0 or comm.size == 1)
    gathered = comm.gather(x, root)
    comm.backward(gathered.exp().square().sum().sqrt() if comm.rank == root else None)
    if x.requires_grad:
        assert_same(x.grad, whole.grad[rows], relative=1e-12)


@case
def order_across_parts(comm):
    """Interleave operations of the whole and of its parts; the loss uses only the first."""
    part = comm.split(comm.rank % 2)
    x = torch.randn(2, dtype=torch.float64, requires_grad=True)
    first = comm.all_reduce(x)
    part.all_reduce(first)
    comm.all_gather(x)
    part.all_gather(first)
    part.backward(first.sum() if comm.rank == 0 else None)
    assert_same(x.grad, torch.ones(2, dtype=torch.float64), relative=1e-14)
    assert not comm._order.waiting()


@case
def two_losses_backward_one_by_one(comm):
    """Symmetric graphs need no `comm.backward`: in either order, nothing is done twice or kept."""
    for first in (0, 1):
        x = [torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        losses = [comm.all_reduce(t).square().sum() for t in x]
        totals = [comm.all_reduce(t.detach()) for t in x]
        losses[first].backward()
        losses[1 - first].backward()
        for t, total in zip(x, totals, strict=True):
            assert_same(t.grad, 2 * comm.size * total, relative=1e-12)
        assert not comm._order.waiting()


@case
def results_that_no_loss_uses(comm):
    """Their graphs do not accumulate in a program of plain backward passes."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(5):
        comm.all_gather(x)  # the result is dropped
        comm.all_reduce(x).sum().backward()
        gc.collect()
        deadline = time.monotonic() + 10  # Gloo's thread holds the result for a moment after the call has returned
        while comm._order.waiting() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not comm._order.waiting()


@case
def waits_in_another_order_than_starts(comm):
    """Gradients find their message at both ends; ranks that wait for nonblocking collectives in other orders raise."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for first in (0, 1):
        x = [torch.ones(2, requires_grad=True) for _ in range(2)]
        late = receives_first(comm, x[0])
        sends = [] if late else [comm.isend(t, right) for t in x]
        receives = [comm.irecv(torch.empty(2), left) for _ in range(2)]
        if late:
            sends = [comm.isend(t, right) for t in x]
        y = [None, None]
        for i in (first, 1 - first):
            y[1 - i] = receives[1 - i].wait()
            sends[i].wait()
        comm.backward((y[0] + 100 * y[1]).sum())
        assert [t.grad.tolist() for t in x] == [[1, 1], [100, 100]]
    if comm.size > 1:
        handles = [comm.iall_reduce(torch.ones(2)) for _ in range(2)]
        order = (0, 1) if comm.rank else (1, 0)
        with refused("the same calls.*wait for iall_reduce #"):
            handles[order[0]].wait()
        with pytest.warns(ResourceWarning, match="dropped"):
            drop(handles)
        with refused("dropped"):
            comm.all_reduce(torch.ones(1))


@case
def a_plain_pass_before_the_ordered_one(comm):
    """A plain backward of an auxiliary loss on all ranks, then the loss of one rank: no call is lost in between."""
    for _ in range(3):
        x = torch.ones(2, dtype=torch.float64, requires_grad=True)
        loss = comm.gather(x.square(), 0).sum() if comm.rank == 0 else None
        if comm.rank:
            comm.gather(x.square(), 0)
        for _ in range(2):
            comm.all_reduce(x).sum().backward()
        comm.backward(loss)
        assert x.grad.tolist() == [2 + 2 * comm.size] * 2


@case
def parts_after_other_parts(comm):
    """Ranks that have been in different numbers of parts still find each other; and so do the same ranks again."""
    for _ in range(2):
        if comm.rank:
            comm.split(0)
        else:
            assert comm.split(None) is None
    for _ in range(2):
        whole = comm.split(7)
        assert whole.all_reduce(torch.tensor(1)).item() == comm.size
    part = whole.split(comm.rank % 2)
    assert part.all_reduce(torch.tensor(1)).item() == len(range(comm.rank % 2, comm.size, 2))


@case
def a_rank_that_diverges_in_backward(comm):
    """With checking, adjoints are compared too: every rank raises and names both, and no wrong data is used."""
    if comm.size == 1:
        return
    x = torch.ones(2, requires_grad=True)
    first, second = comm.all_gather(x), comm.all_reduce(x)
    with refused("the same calls.*adjoint of all_gather #1; .*adjoint of all_reduce #2"):
        (first if comm.rank == 0 else second).sum().backward()
    comm._order._waiting.clear()


@case
def mistakes_in_backward(comm):
    """A mistake on one rank raises on all, before anything moves."""
    loss = comm.all_reduce(torch.ones(2, requires_grad=True))
    with refused("rank 0: loss must have one element, or come with its gradient; got shape|^backward: loss must"):
        comm.backward(loss if comm.rank == 0 else loss.sum())
    if comm.size > 1:
        if comm.rank == 0:
            comm._order._waiting.clear()
        with refused("the collectives that wait for the backward pass must be the same.*rank 0: 0 .*all_reduce #1"):
            comm.backward(loss.sum())
    comm._order._waiting.clear()
    mistakes = [({"nonsense": 1}, "unexpected keyword argument 'nonsense'")]
    if comm.size > 1:
        mistakes.append(({"retain_graph": True}, "retain_graph must be the same on all ranks"))
        mistakes.append(({"check": False}, "unexpected keyword argument 'check'"))
    for culprit in range(comm.size):
        for wrong, message in mistakes:
            loss = comm.all_reduce(torch.ones(2, requires_grad=True)).sum()
            with refused(message, (TypeError, ValueError)):
                comm.backward(loss, **(wrong if comm.rank == culprit else {}))
            comm.backward(loss)
            assert comm.all_reduce(torch.tensor(1)).item() == comm.size, "still in step"
            here = {"nonsense": 1} if comm.rank == culprit else {}
            with refused("unexpected keyword argument 'nonsense'", TypeError):  # a handshake finds the counts
                comm.all_gather(torch.ones(2), check=False, **here)
            assert comm.all_reduce(torch.tensor(1)).item() == comm.size, "still in step"
    # What is kept on all ranks is there for all.
    x = torch.ones(2, requires_grad=True)
    loss = comm.all_reduce(x).sum()
    comm.backward(loss, retain_graph=True)
    comm.backward(loss)
    assert x.grad.tolist() == [2.0 * comm.size] * 2
