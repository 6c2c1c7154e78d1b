"""Requirements on closing a communicator, as further cases of `comm_cases`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import wholebatch as wb

from .registry import case, refused

CLOSED = "this communicator has been closed"
PROC = Path("/proc/self/fd")


def held():
    """Return the descriptors and threads of this process."""
    return len(os.listdir(PROC)), len(os.listdir("/proc/self/task"))


def use(part):
    """Run forward and backward, by the communicator and by a loss."""
    x = torch.ones(3, 2, requires_grad=True)
    part.backward(part.all_gather(x).sum())
    wb.functional.clip_loss(x, x, 1.0, group=part).backward()


@case
def parts_give_back_what_they_hold(comm):
    if not PROC.is_dir():
        pytest.skip("counts descriptors and threads as Linux shows them")
    with comm.split(comm.rank % 2) as part:  # connections that last are made, code is loaded
        use(part)
    comm.all_reduce(torch.tensor(1))
    before = held()
    for number in range(12):
        color = [comm.rank % 2, 0, comm.rank][number % 3]
        with comm.split(color) as part:
            use(part)
            if type(comm) is wb.comm.TorchCommunicator and part.size > 1:  # there is something to free
                assert all(more > some for more, some in zip(held(), before, strict=True))
    assert held() == before


@case
def parts_of_ranks_with_different_pasts(comm):
    """Ranks still find each other after other parts, after fewer closed parts, and again in the same part."""
    outer = comm.split(None if comm.rank == 0 else 1)
    for _ in range(3):
        with comm.split(0) as everyone:
            assert everyone.all_reduce(torch.tensor(1)).item() == comm.size
        if outer is not None:
            with outer.split(outer.rank % 2) as part:
                use(part)
    if outer is not None:
        outer.close()
    with comm.split(-comm.rank % 2) as part:
        use(part)


@case
def nothing_works_after_close(comm):
    part, x = comm.split(0), torch.ones(2 * comm.size, 2, requires_grad=True)
    inner = part.split(0)
    kept = part.all_reduce(x)
    part.close()
    part.close()
    assert part.size == comm.size
    for call in (
        lambda: part.all_gather(x),
        lambda: part.all_gather(x, counts=[2 * comm.size] * comm.size, check=False),
        lambda: part.reduce_scatter(x),
        lambda: part.all_reduce(x),
        lambda: part.all_reduce(x, "max"),
        lambda: part.broadcast(x),
        lambda: part.reduce(x),
        lambda: part.gather(x),
        lambda: part.scatter(x),
        lambda: part.all_to_all(x),
        lambda: part.iall_gather(x),
        lambda: part.ireduce_scatter(x),
        lambda: part.iall_reduce(x),
        lambda: part.isend(x, 0),
        lambda: part.irecv(x, 0),
        lambda: part.send(x, 0),
        lambda: part.recv(x, 0),
        lambda: part.split(0),
        lambda: part.backward(None),
        part.__enter__,
        lambda: wb.CLIPLoss(group=part)(x, x, 1.0),
        lambda: wb.WholeBatch(lambda z: z.sum(), group=part)(x),
    ):
        with refused(CLOSED):
            call()
    with refused(CLOSED):
        kept.sum().backward()
    assert inner.all_reduce(torch.tensor(1)).item() == comm.size, "parts of a part stay open"
    inner.close()
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size


@case
def closing_waits_for_nothing(comm):
    """A handle that is not finished on one rank raises on every rank, and the part stays usable."""
    part = comm.split(0)
    part.check = False  # with checking, all ranks wait for a handle together
    handle = part.iall_reduce(torch.ones(2))
    if comm.rank == 0:
        with refused(r"operations are under way: iall_reduce #1; wait for each before close\(\)"):
            part.close()
        handle.wait()
    else:
        handle.wait()
        with refused("operations are under way"):
            part.close()
    assert part.all_reduce(torch.tensor(1)).item() == comm.size
    part.close()


@case
def closing_does_not_end_what_the_caller_made(comm):
    comm.close()
    with refused(CLOSED):
        comm.all_reduce(torch.tensor(1))
    if dist.is_initialized():
        total = torch.tensor(1)
        dist.all_reduce(total)
        assert total.item() == dist.get_world_size()
    again = type(comm)()
    assert again.all_reduce(torch.tensor(1)).item() == again.size
