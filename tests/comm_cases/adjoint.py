"""Every operation's gradient is its adjoint: the dot test, and planted mistakes that it rejects."""

from __future__ import annotations

import dataclasses
import itertools
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from compare import assert_same

from wholebatch.comm import maps
from wholebatch.comm.point_to_point import End, Send
from wholebatch.partition import Partition

from .registry import case, receives_first, same_on_all, splits, summed, with_settings

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
    """Yield functions that send each rank's tensor to its right neighbor."""
    tag = 3 if comm.transport.keeps_tags(like) else 0

    def nonblocking(x):
        starts = [
            lambda: comm.isend(x, (comm.rank + 1) % comm.size, tag=tag),
            lambda: comm.irecv(like, (comm.rank - 1) % comm.size, tag=tag),
        ]
        order = (1, 0) if receives_first(comm, like) else (0, 1)
        handles = {i: starts[i]() for i in order}
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
    """Yield (name, operation, entries of its input along `dim`, whether its output is a copy on every rank)."""
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
    """Return `rows` entries along `dim`: contiguous, transposed, expanded from one, or conjugated."""
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
    """Split into even and odd ranks, and into a part that some ranks are not in."""
    part = comm.split(comm.rank % 2)
    dot_tests(part, [(torch.float64, 0, "transposed"), (torch.complex64, 1, "contiguous")])
    dot_tests(with_settings(part, loss="replicated"), [(torch.float64, 1, "contiguous")])
    last = comm.split(None if comm.rank == 0 else 1)
    assert (last is None) == (comm.rank == 0)
    if last is not None:
        assert (last.rank, last.size) == (comm.rank - 1, comm.size - 1)
        dot_tests(last, [(torch.float64, 0, "contiguous")])


@contextmanager
def planted(cls, adjoint):
    """Return a map with another adjoint."""
    with patch.object(cls, "adjoint", property(adjoint)):
        yield


class ScaledAllToAll(maps.AllToAll):
    """W times an exchange of parts."""

    def start(self, x):
        finish = super().start(x)
        return lambda: finish() * self.transport.size


MISTAKES = {
    "local slice only": (
        maps.AllGather,
        lambda a: maps.Local(a.transport, a, lambda y: y.split(a.counts)[a.transport.rank].clone()),
        "all_gather",
    ),
    "a factor W": (maps.AllReduce, lambda a: dataclasses.replace(a, scale=a.transport.size), "all_reduce sum"),
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
    "the same root operation": (
        maps.Reduce,
        lambda a: maps.Local(
            a.transport, a, lambda y: y.clone() if a.transport.rank == a.root else torch.zeros_like(y)
        ),
        "reduce sum to 1",
    ),
    "broadcast to the wrong rank": (
        maps.Reduce,
        lambda a: maps.Broadcast(a.transport, (a.root + 1) % a.transport.size),
        "reduce sum to 0",
    ),
    "a factor W on the way from the root": (
        maps.AllToAll,
        lambda a: ScaledAllToAll(a.transport, a.receive_counts, a.send_counts),
        "gather to 0",
    ),
    "parts not sent back": (maps.AllToAll, lambda a: maps.Local(a.transport, a, torch.clone), "all_to_all even"),
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
    """The replicated adjoint is rejected under the sum, and the sum's under "replicated": they differ by W."""
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


@case
def incoming_gradients_are_never_written_to(comm):
    """A sum gives one gradient tensor to both branches: a backward that wrote into it would corrupt the other one."""
    a, b = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    (comm.all_reduce(a) + b * 1).backward(torch.ones(4))  # a plain sum's gradient would be expanded, and copied
    assert torch.equal(a.grad, torch.full((4,), float(comm.size)))
    assert torch.equal(b.grad, torch.ones(4))


@case
def nonlinear_reductions(comm):
    """Compare with amax, amin and prod on one process, over the stack of the ranks' tensors, with ties and zeros."""
    rank, size = comm.rank, comm.size
    stack = same_on_all(comm, (size, 6), torch.float64)
    stack[:, 0] = 2.0  # a tie of all
    stack[0, 1] = 0.0  # one zero
    stack[:2, 2] = 0.0  # two, where there are two ranks
    for op, reference in (("max", torch.amax), ("min", torch.amin), ("prod", torch.prod)):
        weights = same_on_all(comm, (size, 6), torch.float64, seed=8)
        x = stack.clone().requires_grad_()
        # The loss is the sum over ranks; each rank weighs the result differently.
        (reference(x, 0) * weights.sum(0)).sum().backward()
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


@case
def adjoint_of_adjoint(comm):
    """A** = A for every map whose adjoint is in the table."""
    t = comm.transport
    counts = tuple(range(comm.size))
    for a in (
        maps.AllGather(t, counts), maps.ReduceScatter(t, counts), maps.AllReduce(t), maps.AllReduce(t, 0.5),
        maps.AllReduce(t, 0.5, "replicated"), maps.AllGather(t, counts, "replicated"), maps.Broadcast(t, 0),
        maps.Broadcast(t, 0, "replicated"), maps.Reduce(t, 0), maps.gather(t, counts, 0), maps.scatter(t, counts, 0),
        maps.AllToAll(t, counts, counts[::-1]), Send(t, End(sends=True, peer=0, tag=1, slot=7), torch.Size([2])),
    ):  # fmt: skip
        assert a.adjoint.adjoint == a
        assert dataclasses.is_dataclass(a)
