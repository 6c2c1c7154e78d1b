"""What every communicator must do, as functions of a communicator: run on gloo, MPICH, Open MPI and in one process."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import warnings
import weakref
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from unittest.mock import patch

import pytest
import torch
from compare import assert_same
from loss_cases import CORE, LOSSES, dense, gradients, rows_of, whole_batch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.comm import maps
from wholebatch.partition import Partition

CASES = {}


def case(fn):
    """Register a function of a communicator under its name."""
    CASES[fn.__name__] = fn
    return fn


def run_case(name, comm):
    torch.manual_seed(100 + comm.rank)
    CASES[name](comm)


def splits(size):
    """Even, uneven, and with empty parts."""
    return [[2] * size, [(3 * r + 1) % 4 for r in range(size)]]


def with_settings(comm, **settings):
    """The same ranks with other settings."""
    other = comm.split(0)
    for name, value in settings.items():
        setattr(other, name, value)
    return other


def summed(comm, *values):
    """Numbers, summed over ranks by the transport alone."""
    return comm.transport.all_reduce(torch.stack([torch.as_tensor(v).double() for v in values]), "sum")()


def same_on_all(comm, shape, dtype, seed=7):
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


# -- the dot test ------------------------------------------------------------------------------------------------------

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 4e-3,
    torch.complex64: 1e-5,
    torch.complex128: 1e-12,
}


def inner(a, b):
    return torch.vdot(a.detach().flatten().to(torch.complex128), b.detach().flatten().to(torch.complex128)).real


def sides(comm, operation, x, copies):
    """Return the local part of <A x, y> (from the forward pass alone), of <x, A* y> (the gradient), and both norms."""
    x = x.detach().requires_grad_()
    out = operation(x)
    replicated = copies and comm.loss == "replicated"
    cotangent = same_on_all(comm, out.shape, out.dtype) if replicated else torch.randn_like(out)
    comm.backward(out, cotangent)
    left = inner(out, cotangent) * (not replicated or comm.rank == 0)
    return left, inner(x, x.grad), out.detach().abs().square().sum(), cotangent.abs().square().sum()


def assert_adjoint(left, right, out, cotangent, *, dtype, name):
    """Compare <A x, y> with <x, A* y>, both summed over ranks."""
    scale = 1 + (out * cotangent).sqrt().item()
    assert_same(left, right, relative=0, absolute=TOLERANCE[dtype] * scale, what=f"dot test of {name}")


def dot_test(comm, name, operation, x, *, copies):
    assert_adjoint(*summed(comm, *sides(comm, operation, x, copies)), dtype=x.dtype, name=name)


def ring(comm, like):
    """Each rank's tensor to its right neighbor."""

    def nonblocking(x):
        handles = (
            comm.isend(x, (comm.rank + 1) % comm.size, tag=3),
            comm.irecv(like, (comm.rank - 1) % comm.size, tag=3),
        )
        comm.wait(handles[0])
        return comm.wait(handles[1])

    def blocking(x):
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        if comm.rank == 0:
            comm.send(x, right)
            return comm.recv(like, left)
        y = comm.recv(like, left)
        comm.send(x, right)
        return y

    yield "isend, irecv", nonblocking
    if comm.size > 1:
        yield "send, recv", blocking


def operations(comm, counts, dim):
    """(name, operation, entries of its input along `dim`, whether its output is a copy on every rank)."""
    local, total, size = counts[comm.rank], sum(counts), comm.size
    yield "all_gather", lambda x: comm.all_gather(x, dim=dim), local, True
    yield "all_gather with counts", lambda x: comm.all_gather(x, counts=counts, dim=dim), local, True
    yield "iall_gather", lambda x: comm.iall_gather(x, counts=counts, dim=dim).wait(), local, True
    for op in ("sum", "avg"):
        yield f"reduce_scatter {op}", lambda x, op=op: comm.reduce_scatter(x, op, counts=counts, dim=dim), total, False
        yield f"ireduce_scatter {op}", lambda x, op=op: comm.ireduce_scatter(x, op, dim=dim).wait(), total, False
        yield f"all_reduce {op}", lambda x, op=op: comm.all_reduce(x, op), total, True
        yield f"iall_reduce {op}", lambda x, op=op: comm.wait(comm.iall_reduce(x, op)), total, True
    for root in range(size):
        yield f"broadcast from {root}", lambda x, root=root: comm.broadcast(x, root), total, True
        for op in ("sum", "avg"):
            yield f"reduce {op} to {root}", lambda x, op=op, root=root: comm.reduce(x, op, root=root), total, False
        yield f"gather to {root}", lambda x, root=root: comm.gather(x, root, dim=dim), local, False
        yield (
            f"scatter from {root}",
            lambda x, root=root: comm.scatter(
                x if comm.rank == root else x.narrow(dim, 0, 1), root, counts=counts, dim=dim
            ),
            total + (comm.rank != root),
            False,
        )
    sends = [(comm.rank + 2 * q) % 3 for q in range(size)]
    receives = [(q + 2 * comm.rank) % 3 for q in range(size)]
    yield "all_to_all", lambda x: comm.all_to_all(x, send_counts=sends, dim=dim), sum(sends), False
    yield (
        "all_to_all with counts",
        lambda x: comm.all_to_all(x, send_counts=sends, receive_counts=receives, dim=dim),
        sum(sends),
        False,
    )
    yield "all_to_all even", lambda x: comm.all_to_all(x, dim=dim), local, False


def tensor(kind, rows, dim, dtype):
    """`rows` entries along `dim`: contiguous, transposed, expanded from one, or conjugated."""
    shape = [3, 2, 4]
    shape[dim] = rows
    if kind == "expanded":
        shape[(dim + 1) % 3] = 1
        expanded = list(shape)
        expanded[(dim + 1) % 3] = 5
        return torch.randn(shape, dtype=dtype).expand(expanded)
    if kind == "transposed":
        return torch.randn(shape[::-1], dtype=dtype).permute(2, 1, 0)
    x = torch.randn(shape, dtype=dtype)
    return x.conj() if dtype.is_complex else x


def dot_tests(comm, kinds):
    """Run the dot test of every operation; one message sums the sides of all tests of one kind of tensor."""
    for counts, (dtype, dim, kind) in itertools.product(splits(comm.size), kinds):
        x = tensor(kind, counts[comm.rank], dim, dtype)
        like = torch.empty([*x.shape[:dim], counts[(comm.rank - 1) % comm.size], *x.shape[dim + 1 :]], dtype=dtype)
        names, parts = [], []
        for name, operation, rows, copies in operations(comm, counts, dim):
            names.append(name)
            parts += sides(comm, operation, tensor(kind, rows, dim, dtype), copies)
        for name, operation in ring(comm, like):
            names.append(name)
            parts += sides(comm, operation, x, copies=False)
        of = f"loss={comm.loss}, counts {counts}, dim {dim}, {kind}, {dtype}, {comm.size} ranks"
        for name, both in zip(names, summed(comm, *parts).split(4), strict=True):
            assert_adjoint(*both, dtype=dtype, name=f"{name}, {of}")


LAYOUTS = ["contiguous", "transposed", "expanded"]


def float64(comm):
    """Return every dim with every layout; on three ranks and more, each dim with one layout."""
    pairs = itertools.product(range(3), range(3)) if comm.size < 3 else ((dim, dim) for dim in range(3))
    return [(torch.float64, dim, LAYOUTS[layout]) for dim, layout in pairs]


OTHER = [(dtype, 1, "transposed") for dtype in TOLERANCE if dtype != torch.float64]


@case
def dot_test_float64_sum(comm):
    dot_tests(comm, float64(comm))


@case
def dot_test_float64_replicated(comm):
    dot_tests(with_settings(comm, loss="replicated"), float64(comm))


@case
def dot_test_other_dtypes(comm):
    replicated = with_settings(comm, loss="replicated")
    dot_tests(comm, OTHER if comm.size < 4 else OTHER[::2])
    dot_tests(replicated, OTHER if comm.size < 4 else OTHER[1::2])


@case
def dot_test_without_checking(comm):
    dot_tests(with_settings(comm, check=False), [(torch.float64, 0, "contiguous"), (torch.bfloat16, 2, "transposed")])


@case
def dot_test_in_parts(comm):
    """Even and odd ranks, and a part that some ranks are not in."""
    part = comm.split(comm.rank % 2)
    dot_tests(part, [(torch.float64, 0, "transposed"), (torch.complex64, 1, "contiguous")])
    dot_tests(with_settings(part, loss="replicated"), [(torch.float64, 1, "contiguous")])
    last = comm.split(None if comm.rank == 0 else 1)
    assert (last is None) == (comm.rank == 0)
    if last is not None:
        assert (last.rank, last.size) == (comm.rank - 1, comm.size - 1)
        dot_tests(last, [(torch.float64, 0, "contiguous")])


# -- planted mistakes: the dot test sees them --------------------------------------------------------------------------


@contextmanager
def planted(cls, adjoint):
    """Another adjoint for a map."""
    with patch.object(cls, "adjoint", property(adjoint)):
        yield


MISTAKES = {
    "own slice only": (maps.AllGather, lambda a: maps.OwnRows(a.transport, a.counts), "all_gather"),
    "a factor W": (maps.AllReduce, lambda a: maps.Scaled(a.transport, a, a.transport.size), "all_reduce sum"),
    "divided by W": (
        maps.AllGather,
        lambda a: maps.ReduceScatter(a.transport, a.counts, 1 / a.transport.size),
        "all_gather",
    ),
    "no factor for an average": (
        maps.ReduceScatter,
        lambda a: maps.AllGather(a.transport, a.counts),
        "reduce_scatter avg",
    ),
    "another root": (
        maps.Broadcast,
        lambda a: maps.Reduce(a.transport, (a.root + 1) % a.transport.size),
        "broadcast from 0",
    ),
    "the same root operation": (maps.Reduce, lambda a: maps.AtRoot(a.transport, a.root), "reduce sum to 1"),
    "broadcast to the wrong rank": (
        maps.Reduce,
        lambda a: maps.Broadcast(a.transport, (a.root + 1) % a.transport.size),
        "reduce sum to 0",
    ),
    "a factor W on the way from the root": (
        maps.Gather,
        lambda a: maps.Scaled(a.transport, maps.Scatter(a.transport, a.counts, a.root), a.transport.size),
        "gather to 0",
    ),
    "parts not sent back": (maps.AllToAll, lambda a: maps.Copy(a.transport), "all_to_all even"),
}


@case
def planted_mistakes_are_rejected(comm):
    if comm.size == 1:
        return
    counts = [comm.size] * comm.size
    for mistake, (cls, adjoint, name) in MISTAKES.items():
        table = {n: (operation, rows, copies) for n, operation, rows, copies in operations(comm, counts, 0)}
        operation, rows, copies = table[name]
        x = torch.randn(rows, 2, dtype=torch.float64)
        with planted(cls, adjoint), pytest.raises(AssertionError, match="dot test"):
            dot_test(comm, f"{name} with {mistake}", operation, x, copies=copies)
    for name, operation, rows, copies in operations(comm, counts, 0):
        dot_test(comm, name, operation, torch.randn(rows, 2, dtype=torch.float64), copies=copies)


@case
def the_convention_matters(comm):
    """The replicated adjoint is rejected under the sum, and the other way round: they differ by W."""
    if comm.size == 1:
        return
    replicated = with_settings(comm, loss="replicated")
    x = torch.randn(4, dtype=torch.float64)
    for operation in ("all_gather", "all_reduce", "broadcast"):
        for asked, done in ((comm, replicated), (replicated, comm)):
            claims = with_settings(done, loss=asked.loss)
            run = getattr(done, operation)
            claims._order = done._order
            with pytest.raises(AssertionError, match="dot test"):
                dot_test(claims, operation, run, x, copies=True)
        y = x.clone().requires_grad_()
        z = x.clone().requires_grad_()
        comm.backward(getattr(comm, operation)(y).square().sum())
        replicated.backward(getattr(replicated, operation)(z).square().sum())
        assert_same(y.grad, comm.size * z.grad, relative=1e-14)


# -- values ------------------------------------------------------------------------------------------------------------


@case
def values(comm):
    """Every operation does what its name says, in every dtype that can be moved."""
    rank, size = comm.rank, comm.size
    for counts, dtype in itertools.product(
        splits(size), [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]
    ):
        parts = [(torch.arange(3 * n).view(n, 3) % 7 + 10 * r).to(dtype) for r, n in enumerate(counts)]
        full, local = torch.cat(parts), parts[rank]
        assert torch.equal(comm.all_gather(local), full)
        assert torch.equal(comm.all_gather(local.T, dim=1), full.T)
        assert torch.equal(comm.iall_gather(local).wait(), full)
        for root in range(size):
            gathered = comm.gather(local, root)
            assert torch.equal(gathered, full if rank == root else full[:0])
            assert torch.equal(comm.scatter(full if rank == root else None, root, counts=counts), local)
            assert torch.equal(
                comm.scatter((full if rank == root else full[:0]).T, root, counts=counts, dim=1), local.T
            )
            assert torch.equal(comm.broadcast(full + rank, root), full + root)
            total = sum(full * (r % 2) for r in range(size))
            reduced = comm.reduce(full * (rank % 2), root=root)
            assert torch.equal(reduced, total if rank == root else torch.zeros_like(full))
        total = sum(full * (r % 2) for r in range(size))
        assert torch.equal(comm.all_reduce(full * (rank % 2)), total)
        assert torch.equal(comm.reduce_scatter(full * (rank % 2), counts=counts), total.split(counts)[rank])
        rows = Partition.even(len(full), size).rows(rank)
        assert torch.equal(comm.ireduce_scatter(full * (rank % 2)).wait(), total[rows])
        swapped = comm.all_to_all(torch.full((size, 2), rank).to(dtype))
        assert torch.equal(swapped, torch.arange(size).to(dtype)[:, None].expand(size, 2))
    x = torch.tensor([rank + 1.0, -rank])
    everyone = torch.tensor([[r + 1.0, -r] for r in range(size)])
    assert torch.equal(comm.all_reduce(x, "max"), everyone.amax(0))
    assert torch.equal(comm.all_reduce(x, "min"), everyone.amin(0))
    assert torch.equal(comm.all_reduce(x, "prod"), everyone.prod(0))
    assert_same(comm.all_reduce(x, "avg"), everyone.mean(0), relative=1e-6)
    assert comm.all_reduce(torch.tensor(rank)).item() == sum(range(size))
    assert comm.all_gather(torch.tensor([rank % 2 == 0])).tolist() == [r % 2 == 0 for r in range(size)]
    assert comm.all_gather(torch.empty(2, 0)).shape == (2 * size, 0)
    assert comm.all_to_all(torch.empty(0, 3)).shape == (0, 3)


@case
def half_precision_is_summed_in_float32(comm):
    """256 + 1 + 1 is 256 in bfloat16, one addition at a time."""
    x = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
    expected = torch.tensor(256.0 + comm.size - 1).to(torch.bfloat16).item()
    counts = [0] * (comm.size - 1) + [1]
    last = comm.rank == comm.size - 1
    assert comm.all_reduce(x).item() == expected
    assert comm.reduce(x, root=comm.size - 1).item() == (expected if last else 0)
    assert comm.reduce_scatter(x, counts=counts).tolist() == ([expected] if last else [])


@case
def incoming_gradients_are_never_written_to(comm):
    """A sum hands one gradient tensor to both branches: a backward that wrote into it would corrupt the other."""
    a, b = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    (comm.all_reduce(a) + b * 1).backward(torch.ones(4))  # a plain sum's gradient would be expanded, and copied
    assert torch.equal(a.grad, torch.full((4,), float(comm.size)))
    assert torch.equal(b.grad, torch.ones(4))


# -- maximum, minimum, product -----------------------------------------------------------------------------------------


@case
def nonlinear_reductions(comm):
    """Against one process: amax, amin and prod over the stack of the ranks' tensors, with ties and zeros."""
    rank, size = comm.rank, comm.size
    stack = same_on_all(comm, (size, 6), torch.float64)
    stack[:, 0] = 2.0  # a tie of all
    stack[0, 1] = 0.0  # one zero
    stack[:2, 2] = 0.0  # two, where there are two ranks
    for op, twin in (("max", torch.amax), ("min", torch.amin), ("prod", torch.prod)):
        weights = same_on_all(comm, (size, 6), torch.float64, seed=8)
        x = stack.clone().requires_grad_()
        # the sum of the ranks' losses: each rank weighs the result differently
        (twin(x, 0) * weights.sum(0)).sum().backward()
        for name in ("all_reduce", "reduce", "reduce_scatter"):
            local = stack[rank].clone().requires_grad_()
            if name == "all_reduce":
                loss = (comm.all_reduce(local, op) * weights[rank]).sum()
            elif name == "reduce":
                loss = (comm.reduce(local, op, root=size - 1) * weights.sum(0)).sum()
            else:
                loss = (comm.reduce_scatter(local, op) * weights.sum(0)[Partition.even(6, size).rows(rank)]).sum()
            comm.backward(loss)
            assert_same(local.grad, x.grad[rank], relative=1e-12, what=f"{name} {op}")
        local = stack[rank].clone().requires_grad_()
        replicated = with_settings(comm, loss="replicated")
        replicated.backward((replicated.all_reduce(local, op) * weights.sum(0)).sum())
        assert_same(local.grad, x.grad[rank], relative=1e-12, what=f"replicated {op}")


# -- order -------------------------------------------------------------------------------------------------------------


@case
def chain_of_messages(comm):
    """isend, recv, wait on every rank: y_r = x_left^2 w_r, so dx_r = 2 x_r w_right."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    weights = [same_on_all(comm, 3, torch.float64, seed=r) for r in range(comm.size)]
    for _ in range(2):
        x.grad = None
        handle = comm.isend(x, right)
        y = comm.recv(torch.empty(3, dtype=torch.float64), left)
        assert comm.wait(handle) is None
        comm.backward((y.square() * weights[comm.rank]).sum())
        assert_same(x.grad, 2 * x * weights[right], relative=1e-12)


@case
def token_around_a_ring(comm):
    """One rank's tensor visits all ranks, each multiplies by its own parameter; the loss is on the last rank."""
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
    """Every rank makes the same calls, and then builds its loss from other results than its neighbors."""
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
        loss = None  # this rank only serves
    return loss if comm.rank + 1 < comm.size or loss is None else loss + shared.sum()


@case
def graphs_that_branch(comm):
    """The same on one process: the sum of the ranks' losses, differentiated."""
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
    """The last rank holds no rows, gathers, computes; the others have no loss. Frozen rows on rank 0."""
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
    """Operations of the whole and of its parts, interleaved; the loss only looks at the first."""
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
    """In a program of plain backward passes their graphs do not pile up."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(5):
        comm.all_gather(x)  # looked at, and forgotten
        comm.all_reduce(x).sum().backward()
        gc.collect()
        assert not comm._order.waiting()


@case
def waits_in_another_order_than_starts(comm):
    """Gradients find their message at both ends; nonblocking collectives are waited for alike, or that is an error."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for first in (0, 1):
        x = [torch.ones(2, requires_grad=True) for _ in range(2)]
        sends = [comm.isend(t, right) for t in x]
        receives = [comm.irecv(torch.empty(2), left) for _ in range(2)]
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
    """An auxiliary loss of all ranks by plain backward, then the loss of one rank: no call is lost in between."""
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
def retained_graphs(comm):
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    y = comm.all_reduce(x)
    loss = y.sum() if comm.rank == 0 else None
    comm.backward(loss, retain_graph=True)
    comm.backward(loss)
    assert_same(x.grad, torch.full((3,), 2.0, dtype=torch.float64), relative=1e-14)


@case
def double_backward(comm):
    """sum over ranks of <full, full> has gradient 2 W x_r; the sum of that gradient's squares has 8 W^2 x_r."""
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    for gather in (comm.all_gather, lambda t: comm.iall_gather(t).wait()):
        (first,) = torch.autograd.grad(gather(x).square().sum(), x, create_graph=True)
        assert_same(first, 2 * comm.size * x, relative=1e-13)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        assert_same(second, 8 * comm.size**2 * x, relative=1e-13)
    product = comm.all_reduce(x, "prod").sum()
    (first,) = torch.autograd.grad(product, x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        first.square().sum().backward()


@case
def what_needs_no_gradient_costs_none(comm):
    """Metrics, labels and evaluation take no part in the backward pass."""
    for make in (
        lambda: comm.all_reduce(torch.ones(2)),
        lambda: comm.all_gather(torch.arange(3)),
        lambda: comm.iall_reduce(torch.ones(2)).wait(),
        lambda: comm.broadcast(torch.ones(2).requires_grad_().detach()),
    ):
        assert not make().requires_grad
    with torch.no_grad():
        assert not comm.all_reduce(torch.ones(2, requires_grad=True)).requires_grad
    assert not comm._order.waiting()
    # One rank's input needs a gradient: then the operation is differentiable on all.
    x = torch.ones(2, requires_grad=comm.rank == 0)
    y = comm.all_reduce(x)
    assert y.requires_grad
    y.sum().backward()
    assert (x.grad is None) == (comm.rank != 0)


# -- losses in plain single-process style ------------------------------------------------------------------------------


def clip(gather, x, y, scale):
    x, y = gather(F.normalize(x, dim=1)), gather(F.normalize(y, dim=1))
    logits, labels = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def simclr(gather, x, y, temperature):
    z = torch.cat([gather(F.normalize(x, dim=1)), gather(F.normalize(y, dim=1))])
    logits = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z) // 2))


def barlow_twins(total, x, y, weight):
    """Cross-correlation of batch-normalized features; `total` sums over the batch's rows."""
    n = total(torch.ones(len(x), 1, dtype=x.dtype))

    def standardized(z):
        centered = z - total(z) / n
        return centered / (total(centered.square()) / n).sqrt()

    correlation = total(torch.einsum("ni,nj->nij", standardized(x), standardized(y))) / n
    diagonal = correlation.diagonal()
    return (diagonal - 1).square().sum() + weight * (correlation.square().sum() - diagonal.square().sum())


@case
def losses_in_plain_style(comm):
    """A user's own code with these operations: the gradients are those of one process, for both conventions."""
    for counts in splits(comm.size):
        if sum(counts) < 2:
            continue
        data = same_on_all(comm, (2, sum(counts), 4), torch.float64)
        rows = Partition(tuple(counts)).rows(comm.rank)
        for loss_fn, gathers in ((clip, True), (simclr, True), (barlow_twins, False)):
            # Barlow Twins subtracts the batch's mean from this rank's own rows: what follows from that copy is not the
            # same on all ranks, so "replicated" does not hold there, and its gradient is wrong.
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
                    assert error > 1e-2, "the test can see it"
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
    """Every loss gathers and rings over any communicator: uneven rows, empty ranks, messages of the user's between."""
    scale = torch.tensor(7.0, dtype=torch.float64)
    for counts in splits(comm.size):
        for name in [*CORE, "clip, ids, weights", "sup_con", "triplet", "matryoshka"]:
            loss = LOSSES[name]
            whole = whole_batch(loss, tuple(counts))
            expected = dense(loss, whole, 7.0)
            local = [z[at] for z, at in zip(whole, rows_of(loss, tuple(counts), comm.rank), strict=True)]
            for exchange in ("gather", "ring"):
                with torch.no_grad():
                    message = comm.isend(torch.ones(2), (comm.rank + 1) % comm.size)
                actual = gradients(loss, wb.functional, local, scale, group=comm, sync=None, exchange=exchange)
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
    """All ranks refuse it over any transport, and go on; so with incoming gradients that differ."""
    if comm.size == 1:
        return
    x = F.normalize(torch.randn(3, 4, dtype=torch.float64), dim=1).requires_grad_()
    for exchange in ("gather", "ring"):
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
    """The strategies differ in it: "replicate" moves nothing, and the replicated loss's adjoints move nothing."""
    x = torch.randn(4, 3, dtype=torch.float64)
    moved, inside = [], []
    operations = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce", "gather", "scatter")

    def spy(name):
        original = getattr(comm.transport, name)

        def call(*args):
            if not inside:
                moved.append(name)
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
        ("root", [*together, "scatter"]),
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


# -- mistakes ----------------------------------------------------------------------------------------------------------


@contextmanager
def refused(message, kind=ValueError):
    with pytest.raises(kind, match=message) as caught:
        yield caught


@case
def mistakes_on_all_ranks(comm):
    """What one rank does wrong is an error on every rank, and the communicator works afterward."""
    rank, size = comm.rank, comm.size
    wrong = rank == size - 1
    x, square = torch.randn(rank + 1, 2), torch.randn(4, 2)
    half = 4 // 2
    mistakes = [
        (
            lambda: comm.broadcast(square, size),
            f"root must be a rank of this communicator, 0 to {size - 1}; got {size}",
        ),
        (lambda: comm.gather(square, -1 if wrong else 0), "root must be a rank"),
        (lambda: comm.scatter(square, size), "root must be a rank"),
        (lambda: comm.reduce(square, 1), "op must be one of 'sum', 'avg', 'max', 'min', 'prod'; got 1"),
        (lambda: comm.all_reduce(square, "median" if wrong else "sum"), "op must be one of .* got 'median'"),
        (lambda: comm.iall_reduce(square, "max"), "op must be one of 'sum', 'avg'; got 'max'"),
        (lambda: comm.all_reduce(torch.ones(2).long(), "avg"), "would not be an integer"),
        (lambda: comm.all_reduce(torch.ones(2).bool()), "booleans have no sums"),
        (lambda: comm.all_reduce(torch.ones(2) * 1j, "max"), "not offered for complex"),
        (lambda: comm.all_gather(torch.tensor(1.0) if wrong else x), "x must have at least one dimension"),
        (lambda: comm.all_gather(x, dim=2), "dim must be from -2 to 1"),
        (lambda: comm.all_gather([1.0] if wrong else x), "x must be a tensor, got list"),
        (lambda: comm.all_gather(x.to("meta") if wrong else x), "dense tensor with data"),
        (
            lambda: comm.all_gather(x, counts=[1] * (size + 1)),
            f"one entry per rank, {size}, integers, none neg",
        ),
        (lambda: comm.reduce_scatter(square, counts=[-1] * size), "none negative"),
        (lambda: comm.reduce_scatter(square, counts=[9] + [0] * (size - 1)), "ask for 9 rows, x has shape"),
        (lambda: comm.all_to_all(square, send_counts=[5] + [0] * (size - 1)), "send_counts .* ask for 5 rows"),
        (lambda: comm.all_to_all(square, receive_counts=[7] * size), "receive_counts .* but the ranks send it"),
        (lambda: comm.scatter(None, 0), "must pass the tensor to scatter, got None"),
        (lambda: comm.scatter(square, 0, counts=[3] * size), "ask for .* rows"),
        (lambda: comm.scatter(None, 0, counts=[4] * size, check=False), "without checking, every rank passes a tensor"),
        (lambda: comm.split("left"), "color must be an integer .* or None; got 'left'"),
        (
            lambda: wb.WholeBatch(lambda z: z.sum(), group=comm, strategy="root", root=size)(square),
            "root must be a rank",
        ),
    ]
    if size > 1:
        mistakes += [
            (
                lambda: comm.all_gather(torch.zeros(2, 3 if wrong else 2)),
                r"trailing shape must be the same.*rank 0: \[2\]",
            ),
            (lambda: comm.all_gather(x.double() if wrong else x), "dtype must be the same.*rank 0: torch.float32"),
            (
                lambda: comm.reduce_scatter(square, counts=[4, *[0] * (size - 1)] if wrong else None),
                "counts must be the",
            ),
            (lambda: comm.all_reduce(square.T if wrong else square), r"shape must be the same.*rank 0: \[4, 2\]"),
            (lambda: comm.all_reduce(square, "avg" if wrong else "sum"), "op must be the same"),
            (lambda: comm.all_gather(torch.ones(2, 2), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.gather(torch.ones(2, 2), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.all_to_all(torch.ones(8, 8), dim=int(wrong)), "dim must be the same on all ranks"),
            (lambda: comm.scatter(torch.ones(8, 8), dim=int(wrong)), "dim must be those of the root, rank 0: 0"),
            (lambda: comm.broadcast(square, int(wrong)), "root must be the same on all ranks"),
            (lambda: comm.scatter(square if rank == 0 else square.double(), 0), "dtype must be those of the root"),
            (
                lambda: comm.scatter(square if rank == 0 else square[:, :1], 0),
                "other dimensions must be those of the root",
            ),
            (
                lambda: comm.reduce(square) if wrong else comm.broadcast(square),
                r"the same calls in the same order, got rank 0: broadcast #\d+ of float32\(4, 2\); .*reduce #\d+ of",
            ),
            (
                lambda: wb.CLIPLoss(group=comm)(square, square, 1.0) if wrong else comm.all_gather(square),
                "the same calls",
            ),
        ]
    assert half == 2
    for position, (call, message) in enumerate(mistakes):
        with refused(message):
            call()
        assert comm.all_reduce(torch.tensor(1)).item() == size, f"still in step after mistake {position}"
    with torch.set_grad_enabled(wrong), refused("is_grad_enabled" if size > 1 else "grad"):
        comm.all_reduce(square.requires_grad_())
        raise ValueError("grad: nothing to disagree about")


@case
def mistakes_on_this_rank(comm):
    """Handles, messages and settings: nothing collective, so the rank that errs raises."""
    x = torch.randn(3)
    others = LocalOther()
    for call, message in (
        (lambda: comm.send(x, comm.size), "dest must be a rank of this communicator"),
        (lambda: comm.recv(x, -1), "source must be a rank"),
        (lambda: comm.isend(x, 0, tag=-1), "tag must be an integer from 0 to"),
        (lambda: comm.isend(x, 0, tag=2**40), "tag must be an integer from 0 to"),
        (lambda: comm.isend(None, comm.rank), "x must be a tensor, got NoneType"),
        (lambda: comm.wait(3), "handle must be one that this communicator returned, got 3"),
        (lambda: others.comm.wait(others.handle), "handle must be one that this communicator returned"),
        (lambda: wb.comm.LocalCommunicator(loss="mean"), "loss must be one of 'sum', 'replicated'; got 'mean'"),
    ):
        with refused(message):
            call()
    handle = comm.iall_reduce(x)
    handle.wait()
    with refused("iall_reduce .* has been waited for already"):
        comm.wait(handle)
    handle = comm.iall_reduce(y := x.clone())
    y.add_(1)
    with refused("modified in place before", RuntimeError):
        handle.wait()
    with patch.dict(os.environ, WHOLEBATCH_CHECK="yes"), refused("WHOLEBATCH_CHECK must be 0 or 1, got 'yes'"):
        wb.comm.LocalCommunicator()


class LocalOther:
    """A handle of another communicator."""

    def __init__(self):
        self.comm = wb.comm.LocalCommunicator()
        self.handle = wb.comm.LocalCommunicator().iall_reduce(torch.ones(1))
        self.handle.wait()


def drop(handles):
    """Let the last references go."""
    handles.clear()
    gc.collect()


@case
def dropped_handles(comm):
    """On one rank: the next call is an error on every rank, once."""
    if comm.rank == 0:
        with pytest.warns(ResourceWarning, match="dropped without wait"):
            drop([comm.iall_reduce(torch.ones(3))])
        with refused("handles were dropped without wait.*: iall_reduce"):
            comm.all_reduce(torch.ones(1))
    else:
        handle = comm.iall_reduce(torch.ones(3))
        with refused(r"rank 0: all_reduce #\d+: handles were dropped without wait.*: iall_reduce"):
            handle.wait()
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def messages_that_do_not_fit(comm):
    """Another dtype of the same number of bytes: an error at both ends, which names both."""
    if comm.size == 1:
        handle = comm.isend(torch.zeros(2), 0)
        with refused("sends float32.2.*expects int32"):
            comm.recv(torch.zeros(2).int(), 0)
        with refused("sends float32.2.*expects int32"):
            handle.wait()
        with refused("waits for a message from itself, tag 5, that it has not sent"):
            comm.recv(torch.zeros(2), 0, tag=5)
    elif comm.rank < 2:
        with refused(r"rank 0 sends float32\(2\) in isend to rank 1, rank 1 expects int32\(2\) in irecv from rank 0"):
            if comm.rank == 0:
                comm.send(torch.zeros(2), 1)
            else:
                comm.recv(torch.zeros(2).int(), 0)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def messages_of_another_size(comm):
    """Longer or shorter than expected, from the least to much, and none at all: both ends are told, and go on.

    What is left of such a message is never taken for a later one, by no communicator of the same ranks.
    """
    if comm.size == 1:
        return
    for round, (sent, expected) in enumerate([(4, 3), (3, 4), (1000, 1), (1, 1000), (0, 5), (5, 0), (4, 3)]):
        if comm.rank < 2:
            with refused(rf"sends float32\({sent}\) .*expects float32\({expected}\) "):
                if comm.rank == 0:
                    comm.send(torch.full((sent,), -1.0), 1, tag=9)
                else:
                    comm.recv(torch.zeros(expected), 0, tag=9)
            later = with_settings(comm) if round == 3 else comm
            for size in (sent, expected, 7):
                message = torch.arange(float(size)) + round
                if comm.rank == 0:
                    later.send(message, 1, tag=9)
                else:
                    assert torch.equal(later.recv(torch.zeros(size), 0, tag=9), message)
        elif round == 3:
            with_settings(comm)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def messages_with_a_mistake_at_one_end(comm):
    """The other end hears of it at once; gradients of later messages find their way."""
    if comm.size == 1:
        return
    errors = []
    for wrong_end in (0, 1):
        if comm.rank < 2:
            wrong = comm.rank == wrong_end
            with refused(rf"rank {wrong_end}, i(send|recv) .* must be a tensor, got") as caught:
                if comm.rank == 0:
                    comm.send([1.0] if wrong else torch.zeros(3), 1)
                else:
                    comm.recv("nothing" if wrong else torch.zeros(3), 0)
            errors.append(str(caught.value))
        told = "\n".join(errors).encode()[:300].ljust(300)
        both = comm.all_gather(torch.frombuffer(bytearray(told), dtype=torch.uint8).unsqueeze(0))
        assert torch.equal(both[0], both[1])
        x = torch.full((3,), 2.0, requires_grad=True)
        loss = None
        if comm.rank == 0:
            comm.send(x, 1)
        elif comm.rank == 1:
            loss = comm.recv(torch.zeros(3), 0).square().sum()
        comm.backward(loss)
        assert x.grad is None if comm.rank else torch.equal(x.grad, torch.full((3,), 4.0))


@case
def a_tag_wears_out(comm):
    """After many messages that did not fit a tag is refused, so that no old message is taken for a new one."""
    if comm.size == 1:
        return
    for attempt in range(maps.EPOCHS + 1):
        if comm.rank < 2:
            with refused("64 messages .* did not fit" if attempt == maps.EPOCHS else "a message must have the same"):
                if comm.rank == 0:
                    comm.send(torch.zeros(2), 1, tag=11)
                else:
                    comm.recv(torch.zeros(3), 0, tag=11)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def parts_after_other_parts(comm):
    """Ranks that have been in another number of parts meet all the same; and so do the same ranks again."""
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
def sends_that_no_loss_reaches(comm):
    """A plain backward would leave the sender's gradient out; it says so."""
    x = torch.ones(2, requires_grad=True)
    handle = comm.isend(x, (comm.rank + 1) % comm.size)
    y = comm.recv(torch.empty(2), (comm.rank - 1) % comm.size)
    handle.wait()
    with refused(r"the backward pass of messages \(isend to rank \d.*comm.backward\(loss\)", RuntimeError):
        y.sum().backward()
    assert x.grad is None
    comm._order._waiting.clear()


@case
def messages_without_gradient(comm):
    """Data that is sent takes no part in the backward pass at either end; a gradient with no way back is refused."""
    left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for like in (torch.empty(2), torch.empty(2).long()):
        handle = comm.isend(torch.full_like(like, comm.rank), right)
        y = comm.recv(like, left)
        handle.wait()
        assert y.tolist() == [left, left]
        assert not y.requires_grad
    x = torch.ones(2, requires_grad=True)
    comm.all_reduce(x).sum().backward()
    assert not comm._order.waiting()
    handle = comm.isend(x, right)
    with torch.no_grad(), refused(f"rank {left} sends what requires a gradient.* rank {comm.rank} receives it under"):
        comm.recv(torch.empty(2), left)
    with refused("receives it under torch.no_grad"):
        handle.wait()


@case
def a_rank_that_diverges_in_backward(comm):
    """With checking, the adjoints are compared too: an error on every rank that names both, not garbage."""
    if comm.size == 1:
        return
    x = torch.ones(2, requires_grad=True)
    first, second = comm.all_gather(x), comm.all_reduce(x)
    with refused("the same calls.*adjoint of all_gather #1; .*adjoint of all_reduce #2"):
        (first if comm.rank == 0 else second).sum().backward()
    comm._order._waiting.clear()


@case
def graphs_are_freed(comm):
    """Nothing keeps a graph once its backward pass has run, or once all references to it and to its order are gone."""
    inputs = []
    for backward in (True, False):
        ours = with_settings(comm)
        ours._order = type(ours._order)()
        for _ in range(3):
            x = torch.ones(2, requires_grad=True)
            y = x * 1  # saved by the graph alone
            inputs.append(weakref.ref(y))
            z = ours.all_reduce(y) + ours.iall_reduce(y).wait() + ours.all_reduce(y, "max")
            handle = ours.isend(y, (ours.rank + 1) % ours.size)
            z = z + ours.recv(torch.empty(2), (ours.rank - 1) % ours.size)
            handle.wait()
            if backward:
                ours.backward(z.sum())
            del x, y, z, handle
        if backward:
            gc.collect()
            assert not any(ref() is not None for ref in inputs), "after backward"
    del ours
    gc.collect()
    assert not any(ref() is not None for ref in inputs), "after everything was dropped"


@case
def unused_results_have_no_gradient(comm):
    """Not one of zeros either, which an infinite derivative would turn into NaN."""
    x = torch.zeros(2, requires_grad=True)
    comm.all_gather(x.sqrt())
    comm.backward(comm.all_reduce(3 * x).sum())
    assert x.grad.tolist() == [3 * comm.size] * 2


@case
def recomputed_calls(comm):
    """Checkpointing, of both kinds: the call is repeated in backward, and its adjoint runs once."""
    for reentrant in (False, True):
        x = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
        y = checkpoint(lambda t: comm.all_reduce(t.sin()), x, use_reentrant=reentrant)
        comm.backward(comm.all_reduce(y.cos()).sum())
        z = torch.arange(3.0, dtype=torch.float64, requires_grad=True)
        (comm.size * (comm.size * z.sin()).cos()).sum().backward()
        assert_same(x.grad, z.grad, relative=1e-12)


@case
def mistakes_in_backward(comm):
    """On one rank: an error on all, before anything moves."""
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


@case
def facts_that_do_not_fit_one_message(comm):
    """A second round carries them."""
    facts = wb.comm.handshake(comm, lambda: {"long": "x" * (5000 * comm.rank)}, caller="test")
    assert [len(each["long"]) for each in facts] == [5000 * r for r in range(comm.size)]


@case
def one_element_of_any_stride(comm):
    for x in (torch.ones(1).expand(1), torch.tensor(1.0).expand(1), torch.ones(1, 1).expand(1, 1).T):
        y = x.detach().requires_grad_()
        comm.broadcast(y * 1).sum().backward()
        comm.reduce(y).sum().backward()
        assert comm.all_reduce(x).sum().item() == comm.size


@case
def nothing_to_differentiate(comm):
    with refused("loss does not require a gradient, and no operation of this communicator waits"):
        comm.backward(torch.ones(()))
    comm.backward(None)


@case
def never_waited_for(comm):
    x = torch.ones(2, requires_grad=True)
    handle = comm.iall_reduce(x)
    with refused("was never waited for, so its gradient", RuntimeError):
        comm.backward(None)
    handle.wait()


@case
def trace(comm):
    """One line per operation, forward and backward."""
    tracing = with_settings(comm, trace=True)
    x = torch.ones(2, 3, requires_grad=True)
    with redirect_stderr(StringIO()) as lines:
        tracing.backward(tracing.all_gather(x).sum())
    where = f"[rank {comm.rank} of {comm.size}]"
    first, second = lines.getvalue().splitlines()
    assert first.startswith(f"{where} all_gather #1, float32(2, 3) -> float32({2 * comm.size}, 3), ")
    assert first.endswith(" ms")
    assert second.startswith(f"{where} adjoint of all_gather #1, float32({2 * comm.size}, 3) -> float32(2, 3), ")


@case
def abandoned_graphs_are_reported(comm):
    """Evaluation with gradients enabled, and no backward: a warning that says what to do."""
    comm = with_settings(comm, check=False)
    comm._order = type(comm._order)()
    x = torch.ones(1, requires_grad=True)
    for _ in range(999):
        comm.all_reduce(x)
    with pytest.warns(RuntimeWarning, match=r"1000 operations .* torch.no_grad\(\)"):
        comm.all_reduce(x)


def adjoint_of_adjoint(comm):
    """A** = A, for every map whose adjoint is one of the table's."""
    t = comm.transport
    counts = tuple(range(comm.size))
    for a in (
        maps.AllGather(t, counts), maps.ReduceScatter(t, counts), maps.AllReduce(t), maps.AllReduce(t, 0.5),
        maps.AllReduce(t, 0.5, "replicated"), maps.AllGather(t, counts, "replicated"), maps.Broadcast(t, 0),
        maps.Broadcast(t, 0, "replicated"), maps.Reduce(t, 0), maps.Gather(t, counts, 0), maps.Scatter(t, counts, 0),
        maps.AllToAll(t, counts, counts[::-1]), maps.Send(t, 0, 1, 0, 7, 0, torch.Size([2])),
    ):  # fmt: skip
        assert a.adjoint.adjoint == a
        assert dataclasses.is_dataclass(a)


CASES["adjoint_of_adjoint"] = adjoint_of_adjoint
warnings.filterwarnings("error")
