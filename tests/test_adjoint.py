"""Every collective is a linear map A: sum_r <(A x)_r, y_r> = sum_r <x_r, (A* y)_r> for random x and cotangents y.

The left side uses the forward pass alone, the right side the gradient that autograd returns. The same identity
rejects planted wrong adjoints, so it would see one of ours.
"""

import pytest
import torch
import torch.distributed as dist
from cases import SHARDS
from compare import assert_same

from wholebatch.comm import LocalCommunicator, TorchCommunicator
from wholebatch.testing import RankError, run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128]
TOLERANCE = dict(zip(DTYPES, [1e-12, 1e-5, 2e-2, 4e-3, 1e-12], strict=True))


def inner(a, b):
    return torch.vdot(a.flatten().to(torch.complex128), b.flatten().to(torch.complex128)).real


def dot_test(operation, x, dtype):
    """Both sides of the identity, summed over ranks, in this operation's precision."""
    x = x.detach().requires_grad_()
    out = operation(x)
    cotangent = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, x, cotangent)
    sides = torch.stack([inner(out, cotangent), inner(x, gradient)]).detach()
    size = torch.stack([out.detach().abs().square().sum().double(), cotangent.abs().square().sum().double()])
    dist.all_reduce(sides)
    dist.all_reduce(size)
    assert_same(sides[0], sides[1], relative=0, absolute=TOLERANCE[dtype] * (1 + size.prod().sqrt().item()), what="dot")


def variants(rows, dtype):
    """A contiguous input, a transposed one, and one expanded from a single row."""
    yield torch.randn(rows, 3, 2, dtype=dtype)
    yield torch.randn(2, 3, rows, dtype=dtype).permute(2, 1, 0)
    yield torch.randn(1, 3, 2, dtype=dtype).expand(rows, 3, 2)


def adjoint_body(counts):
    comm = TorchCommunicator()
    torch.manual_seed(dist.get_rank())
    for dtype in DTYPES:
        for x in variants(counts[comm.rank], dtype):
            dot_test(comm.all_gather, x, dtype)
            dot_test(lambda t: comm.all_gather(t, counts=counts), x, dtype)
        for x in variants(sum(counts), dtype):
            dot_test(lambda t: comm.reduce_scatter(t, counts=counts), x, dtype)
            dot_test(comm.reduce_scatter, x, dtype)
            dot_test(comm.all_reduce, x, dtype)
            for root in range(comm.size):
                dot_test(lambda t, root=root: comm.broadcast(t, root=root), x, dtype)
                dot_test(lambda t, root=root: comm.reduce(t, root=root), x, dtype)


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_dot_test(counts):
    run_ranks(adjoint_body, len(counts), counts)


class OwnSlice(torch.autograd.Function):
    """The usual mistake: all_gather whose gradient is this rank's own slice."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm, ctx.rows = comm, len(x)
        return comm.all_gather(x)

    @staticmethod
    def backward(ctx, grad):
        return grad[ctx.comm.rank * ctx.rows : (ctx.comm.rank + 1) * ctx.rows], None


class DividedByW(OwnSlice):
    """Another: the mean over ranks in the place of the sum."""

    @staticmethod
    def backward(ctx, grad):
        rows = [ctx.rows] * ctx.comm.size
        return ctx.comm.reduce_scatter(grad, counts=rows) / ctx.comm.size, None


class WrongRoot(torch.autograd.Function):
    """broadcast from 0 whose adjoint is a broadcast instead of a reduction."""

    @staticmethod
    def forward(ctx, x, comm):
        ctx.comm = comm
        return comm.broadcast(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.comm.broadcast(grad), None


def planted_mistake(node):
    torch.manual_seed(dist.get_rank())
    comm = TorchCommunicator()
    dot_test(lambda x: node.apply(x, comm), torch.randn(3, 2, dtype=torch.float64), torch.float64)


@pytest.mark.parametrize("node", [OwnSlice, DividedByW, WrongRoot])
def test_planted_mistakes_are_rejected(node):
    with pytest.raises(RankError, match="AssertionError: dot"):
        run_ranks(planted_mistake, 2, node)


def values_body(counts):
    """Forward values against the definition, and the gradient of a gradient."""
    comm = TorchCommunicator()
    rows = [torch.arange(3.0 * n).view(n, 3) + 100 * rank for rank, n in enumerate(counts)]
    own = rows[comm.rank].clone().requires_grad_()
    full = comm.all_gather(own)
    assert torch.equal(full, torch.cat(rows))
    start = sum(counts[: comm.rank])
    scattered = comm.reduce_scatter(full * (comm.rank + 1), counts=counts)
    total = sum(range(1, comm.size + 1))
    assert torch.equal(scattered, total * rows[comm.rank])
    assert torch.equal(comm.all_reduce(torch.tensor([1.0 + comm.rank])), torch.tensor([float(total)]))
    assert torch.equal(comm.all_reduce(torch.tensor([-1.0 * comm.rank]), "max"), torch.zeros(1))
    last = comm.size - 1
    assert comm.broadcast(torch.tensor(float(comm.rank)), root=last).item() == last
    assert comm.reduce(torch.tensor(1.0 + comm.rank), root=last).item() == (total if comm.rank == last else 0)
    # sum over ranks of <full, full> has gradient 2 W x_r, and the gradient of its square norm 8 W^2 x_r.
    (first,) = torch.autograd.grad(full.square().sum(), own, create_graph=True)
    assert torch.equal(first, 2 * comm.size * own)
    (second,) = torch.autograd.grad(first.square().sum(), own)
    assert torch.equal(second, 8 * comm.size**2 * own)
    assert len(full[start : start + counts[comm.rank]]) == len(own)


@pytest.mark.parametrize("counts", SHARDS, ids=str)
def test_values_and_double_backward(counts):
    run_ranks(values_body, len(counts), counts)


def shared_gradient_body():
    """A sum hands one gradient tensor to both branches: a backward that wrote into it would corrupt the other."""
    comm = TorchCommunicator()
    a, b = torch.ones(4, requires_grad=True), torch.ones(4, requires_grad=True)
    (comm.all_reduce(a) + b * 1).backward(torch.ones(4))  # a plain sum's gradient would be expanded, and copied
    return a.grad, b.grad


def test_incoming_gradients_are_never_written_to():
    for a, b in run_ranks(shared_gradient_body, 3):
        assert torch.equal(a, torch.full((4,), 3.0))
        assert torch.equal(b, torch.ones(4))


def half_precision_body():
    """256 + 1 + 1 is 256 in bfloat16, one addition at a time, and 258 in float32 and then in bfloat16."""
    comm = TorchCommunicator()
    x = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
    everyone = comm.all_reduce(x), comm.reduce(x, root=2), comm.reduce_scatter(x, counts=[0, 0, 1])
    assert all(y.dtype == torch.bfloat16 for y in everyone)
    return everyone


def test_half_precision_is_summed_in_float32():
    *_, (all_reduced, reduced, scattered) = run_ranks(half_precision_body, 3)
    assert all_reduced.item() == reduced.item() == scattered.item() == 258


def test_local_communicator_is_the_identity():
    comm, x = LocalCommunicator(), torch.randn(3, 2, requires_grad=True)
    for out in (
        comm.all_gather(x),
        comm.reduce_scatter(x, counts=[3]),
        comm.reduce_scatter(x),
        comm.all_reduce(x),
        comm.broadcast(x),
        comm.reduce(x),
    ):
        assert torch.equal(out, x)
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))


def mistakes_body():
    comm, rank = TorchCommunicator(), dist.get_rank()
    x = torch.randn(rank + 1, 2)
    square = torch.randn(4, 2)
    mistakes = [
        (lambda: comm.all_gather(torch.zeros(2, 2 + rank)), r"trailing shape must .* rank 0: \[2\]; rank 1: \[3\]"),
        (lambda: comm.all_gather(x.double() if rank else x), "dtype must .* torch.float32; rank 1: torch.float64"),
        (lambda: comm.all_gather(torch.tensor(1.0) if rank else x), "rank 1: x must have at least one dimension"),
        (lambda: comm.all_gather(x, counts=[1]), "one entry per rank, 2; got"),
        (lambda: comm.reduce_scatter(square, counts=[2, 2] if rank else [1, 3]), "counts must be the same"),
        (lambda: comm.reduce_scatter(square[:, : 2 - rank], counts=[2, 2]), "shape must be the same"),
        (lambda: comm.reduce_scatter(square, counts=[4, 5] if rank else [2, 2]), "rank 1: counts .* ask for 9 rows"),
        (lambda: comm.all_reduce(square.T if rank else square), r"shape must .* \[4, 2\]; rank 1: \[2, 4\]"),
        (lambda: comm.all_reduce(square.double() if rank else square), "dtype must be the same"),
        (lambda: comm.all_reduce(square, "max" if rank else "sum"), "op must be the same"),
        (lambda: comm.all_reduce(square, "median"), "'sum' or 'max', got 'median'"),
        (lambda: comm.all_reduce(square.clone().requires_grad_(), "max"), "no gradient here"),
        (lambda: comm.broadcast(square, root=2), r"root must be a rank.*0 to 1; got 2"),
        (lambda: comm.broadcast(square, root=rank), "root must be the same on all ranks"),
        (lambda: comm.reduce(square.double() if rank else square), "dtype must be the same"),
        (lambda: comm.reduce(square) if rank else comm.broadcast(square), "all ranks must make the same calls"),
    ]
    for call, message in mistakes:
        with pytest.raises(ValueError, match=message):
            call()


def test_without_a_handshake_a_rank_still_looks_at_its_own_arguments():
    comm, x = LocalCommunicator(), torch.ones(3, requires_grad=True)
    for call, message in (
        (lambda: comm.all_reduce(x, "max", check=False), "no gradient here"),
        (lambda: comm.all_reduce(x, "median", check=False), "got 'median'"),
        (lambda: comm.broadcast(x, root=1, check=False), "root must be a rank"),
        (lambda: comm.reduce_scatter(x, counts=[2], check=False), "ask for 2 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_mistakes_are_refused_on_every_rank():
    run_ranks(mistakes_body, 2)


def test_without_a_process_group():
    with pytest.raises(ValueError, match="init_process_group"):
        TorchCommunicator()
