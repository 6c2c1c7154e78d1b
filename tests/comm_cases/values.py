"""Results of operations, and the trace that they print."""

from __future__ import annotations

import itertools
from contextlib import redirect_stderr
from io import StringIO

import torch
from compare import assert_same

from wholebatch.partition import Partition

from .registry import case, splits, with_settings


@case
def values(comm):
    """Every operation returns the result that its name promises, in every dtype that can be moved."""
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
    """In bfloat16, 256 + 1 + 1 by single additions is 256."""
    x = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
    expected = torch.tensor(256.0 + comm.size - 1).to(torch.bfloat16).item()
    counts = [0] * (comm.size - 1) + [1]
    last = comm.rank == comm.size - 1
    assert comm.all_reduce(x).item() == expected
    assert comm.reduce(x, root=comm.size - 1).item() == (expected if last else 0)
    assert comm.reduce_scatter(x, counts=counts).tolist() == ([expected] if last else [])


@case
def facts_that_do_not_fit_one_message(comm):
    """They are sent in a second round."""
    facts = comm.handshake(lambda: {"long": "x" * (5000 * comm.rank)}, caller="test")
    assert [len(each["long"]) for each in facts] == [5000 * r for r in range(comm.size)]


@case
def one_element_of_any_stride(comm):
    for x in (torch.ones(1).expand(1), torch.tensor(1.0).expand(1), torch.ones(1, 1).expand(1, 1).T):
        y = x.detach().requires_grad_()
        comm.broadcast(y * 1).sum().backward()
        comm.reduce(y).sum().backward()
        assert comm.all_reduce(x).sum().item() == comm.size


@case
def trace(comm):
    """Print one line per operation, forward and backward."""
    tracing = with_settings(comm, trace=True)
    x = torch.ones(2, 3, requires_grad=True)
    with redirect_stderr(StringIO()) as lines:
        tracing.backward(tracing.all_gather(x).sum())
    where = f"[rank {comm.rank} of {comm.size}]"
    first, second = lines.getvalue().splitlines()
    assert first.startswith(f"{where} all_gather #1, float32(2, 3) -> float32({2 * comm.size}, 3), ")
    assert first.endswith(" ms")
    assert second.startswith(f"{where} adjoint of all_gather #1, float32({2 * comm.size}, 3) -> float32(2, 3), ")
