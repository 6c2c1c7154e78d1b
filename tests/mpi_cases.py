"""Cases for MPI alone: communicators of mpi4py that are null, freed or finalized, and ranks that do not call."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from compare import assert_same
from mpi4py import MPI

import wholebatch as wb
from wholebatch.comm import CommunicationError, MPICommunicator, select_communicator
from wholebatch.partition import Partition


def communicators_of_mpi4py():
    """Losses accept them; each gets one private duplicate, apart from the program's other messages."""
    assert isinstance(select_communicator(MPI.COMM_WORLD), MPICommunicator)
    x = torch.randn(3, 4, dtype=torch.float64)
    local = wb.functional.clip_loss(x, x, 1.0, group=MPI.COMM_SELF)
    assert_same(local, wb.reference.clip_loss(x, x, 1.0), relative=1e-12)
    first, second = MPICommunicator(), MPICommunicator(MPI.COMM_WORLD)
    assert first.transport._comm == second.transport._comm
    assert first.transport._comm != MPI.COMM_WORLD
    left, right = (first.rank - 1) % first.size, (first.rank + 1) % first.size
    request = MPI.COMM_WORLD.irecv(source=left, tag=0)  # a receive of the user's: ours must not match it
    handle = first.isend(torch.ones(2), right)
    assert first.recv(torch.empty(2), left).tolist() == [1, 1]
    handle.wait()
    assert not request.test()[0]
    MPI.COMM_WORLD.Barrier()
    sent = MPI.COMM_WORLD.isend("mine", dest=right, tag=0)
    assert request.wait() == "mine"
    sent.wait()


def communicators_without_this_rank():
    with pytest.raises(ValueError, match="this process is not in the MPI communicator, or"):
        MPICommunicator(MPI.COMM_NULL)
    with pytest.raises(ValueError, match="comm must be an intracommunicator of mpi4py, got int"):
        MPICommunicator(3)
    with pytest.raises(ValueError, match=r"must be a wholebatch communicator, .* a communicator of mpi4py or None"):
        select_communicator("MPI")


def freed_communicators():
    theirs = MPI.COMM_WORLD.Dup()
    comm = MPICommunicator(theirs)
    assert comm.all_reduce(torch.tensor(1)).item() == comm.size
    theirs.Free()
    with pytest.raises(ValueError, match="the MPI communicator has been freed"):
        comm.all_reduce(torch.tensor(1))
    with pytest.raises(ValueError, match="it has been freed"):
        MPICommunicator(theirs)


def closed_parts():
    """MPI allows about two thousand communicators: closing a part frees its communicator; a caller's stays."""
    theirs = MPI.COMM_WORLD.Dup()
    comm = MPICommunicator(theirs)
    part = comm.split(0)
    part.close()
    assert part.transport._messages_over == MPI.COMM_NULL
    duplicate = comm.transport._comm
    comm.close()
    assert duplicate != MPI.COMM_NULL, "another MPICommunicator(theirs) may use it"
    assert MPICommunicator(theirs).all_reduce(torch.tensor(1)).item() == theirs.Get_size()
    theirs.Free()


def launched_without_a_group():
    """Under mpiexec, a loss without a group would take its local rows for the whole batch."""
    if MPI.COMM_WORLD.Get_size() > 1:
        assert any(name in os.environ for name in ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
        with pytest.raises(
            ValueError, match=r"each would take its local rows.*group=wholebatch.comm.MPICommunicator\(\)"
        ):
            wb.functional.clip_loss(torch.ones(2, 2), torch.ones(2, 2), 1.0)


def a_rank_that_does_not_come():
    """The timeout's error has the fix; with checking, it reports the rank that did not call at all."""
    size = MPI.COMM_WORLD.Get_size()
    if size == 1:
        return
    for check, hint in ((False, "WHOLEBATCH_CHECK=1"), (True, "one did not call at all")):
        comm = MPICommunicator(MPI.COMM_WORLD.Dup(), check=check, timeout_s=1)
        if comm.rank:
            with pytest.raises(CommunicationError, match=rf"rank {comm.rank} of {size}, in all_gather #1.*{hint}"):
                comm.all_gather(torch.ones(2), counts=[2] * size)
        MPI.COMM_WORLD.Barrier()


def a_head_is_saved_and_loaded():
    """Save and load by all ranks, by half of them, and by each alone."""
    world = MPICommunicator()
    folder = Path(MPI.COMM_WORLD.bcast(tempfile.mkdtemp() if world.rank == 0 else None, root=0))
    head = wb.PartialFC(4, 23, margin=wb.AdaFace(), seed=1, group=world)
    optimizer = wb.SparseSGD(head.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(world.rank)
    head(torch.randn(3, 4, generator=generator), torch.tensor([0, 11, 22])).backward()
    optimizer.step()
    save = wb.heads.save_head(folder / "head", head, optimizer)
    counts, state = Partition.even(23, world.size).counts, optimizer.state[head.weight]["momentum_buffer"]
    whole, momentum = (world.all_gather(x, counts=counts) for x in (head.weight.detach(), state))
    for color in (0, world.rank % 2, world.rank):
        group = MPICommunicator(MPI.COMM_WORLD.Split(color))
        other = wb.PartialFC(4, 23, margin=wb.AdaFace(), seed=2, group=group)
        one = wb.SparseSGD(other.parameters(), lr=0.1, momentum=0.9)
        wb.heads.load_head(folder / "head", other, one, save_id=save)
        assert torch.equal(other.weight.detach(), whole[other.local_classes])
        assert torch.equal(one.state[other.weight]["momentum_buffer"], momentum[other.local_classes])
        assert torch.equal(other.margin.mean, head.margin.mean)
        with pytest.raises(ValueError, match="has a checkpoint already"):
            wb.heads.save_head(folder / "head", other)
    MPI.COMM_WORLD.Barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


def after_finalization():
    comm = MPICommunicator()
    MPI.Finalize()
    with pytest.raises(ValueError, match="MPI has been finalized"):
        comm.all_reduce(torch.ones(1))
    with pytest.raises(ValueError, match="MPI has been finalized"):
        MPICommunicator()


MPI_CASES = {
    case.__name__: case
    for case in (
        communicators_of_mpi4py,
        communicators_without_this_rank,
        freed_communicators,
        closed_parts,
        launched_without_a_group,
        a_rank_that_does_not_come,
        a_head_is_saved_and_loaded,
        after_finalization,  # the last one
    )
}
