"""Move bytes over any implementation of MPI, also more than 2^31 entries.

MPI gets the addresses of tensors. Movements are in bytes, so every dtype can move; reductions are in MPI's types (half
precision and complex numbers never reach it: `wire` has widened them). Tensors on another device are staged through the
host: `Tensor.cpu()` waits for the kernels that write them, so MPI never reads early.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .transport import ABANDONED, FAILED, Finish, Transport, done, named

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_ELEMENTS = 2**30  # of one reduction: MPI before version 4 counts in 32 bits
_BUSY_TESTS = 1000  # how often a request is tested before this process lets others run


class MPITransport(Transport):
    """Move bytes over a communicator of mpi4py that nobody else uses."""

    def __init__(self, comm: MPI.Intracomm, timeout_s: float, *, made_by_split: bool = False) -> None:
        super().__init__()
        from mpi4py import MPI

        self._mpi = MPI
        self._messages_over, self._made_by_split = comm, made_by_split
        self.timeout_s = timeout_s
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.max_tag = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)
        self.kept = _kept(MPI, comm)
        self.failed = self.kept.setdefault(FAILED, {})
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
        return MPITransport(part, self.timeout_s, made_by_split=True) if member else None

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
        requests = [
            self._comm.Ibcast([self._buffer(piece), piece.numel(), self._mpi.BYTE], root=root)
            for (piece,) in self._pieces(_bytes(out))
        ]
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
        requests = [
            self._comm.Isend([self._buffer(piece), piece.numel(), self._mpi.BYTE], dest=dest, tag=wire_tag)
            for (piece,) in self._pieces(_bytes(wire))
        ]
        return self._finisher(requests, lambda: x, wire)

    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish:
        wire = out.cpu()
        requests = [
            self._comm.Irecv([self._buffer(piece), piece.numel(), self._mpi.BYTE], source=source, tag=wire_tag)
            for (piece,) in self._pieces(_bytes(wire))
        ]
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


def _bytes(x: Tensor) -> Tensor:
    # not view(-1): of a tensor with one element, the stride may be anything
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


_KEY: list[int] = []  # under which a duplicate has what is kept of its ranks


def _kept(mpi: Any, duplicate: Any) -> dict[str, Any]:
    """Return what all communicators over this duplicate share."""
    if not _KEY:
        _KEY.append(mpi.Comm.Create_keyval())
    if duplicate.Get_attr(_KEY[0]) is None:
        duplicate.Set_attr(_KEY[0], {})
    return duplicate.Get_attr(_KEY[0])
