"""Collectives over a torch.distributed process group, any backend, uneven rows included."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import _c10d
from .communicator import Communicator

_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class TorchCommunicator(Communicator):
    """The ranks of a process group.

    Args:
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for the default group as it is now.

    Raises:
        ValueError: if torch.distributed is not initialised, if this rank is not in the group, or if `group` is
            something else.
    """

    def __init__(self, group: object = None) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group() first, "
                "or use LocalCommunicator() for one process"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a one-dimensional mesh, got {group.ndim} axes; pass mesh['axis']")
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_not_a_member())
        if not isinstance(group, dist.ProcessGroup | None):
            raise ValueError(f"group must be a ProcessGroup, a DeviceMesh or None; got {type(group).__name__}")
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(_not_a_member())
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._backend = str(dist.get_backend(group))

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return f"TorchCommunicator(rank={self.rank}, size={self.size}, backend={self._backend!r})"

    def _wire(self, x: Tensor) -> Tensor:
        """x on a device that this group's backend can move."""
        if x.device.type == "cpu":
            return x.to("cuda") if self._backend == "nccl" else x
        return x if "nccl" in self._backend and x.device.type == "cuda" else x.cpu()

    def _all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        wire = self._wire(x)
        out = wire.new_empty((sum(counts), *x.shape[1:]))
        if len(set(counts)) == 1 and out.numel():
            _c10d.all_gather_single(out, wire, group=self._group)
        else:
            # Backends disagree about uneven all-gathers; broadcasts into the slices need no padding.
            for root, part in enumerate(out.split(counts)):
                if part.numel():
                    if root == self.rank:
                        part.copy_(wire)
                    dist.broadcast(part, group=self._group, group_src=root)
        return out.to(x.device)

    def _reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        wire = self._wire(x)
        own = wire.new_empty((counts[self.rank], *x.shape[1:]))
        if len(set(counts)) == 1 and "nccl" in self._backend and wire.is_cuda:
            _c10d.reduce_scatter_single(own, wire, group=self._group)
            return own.to(x.device)
        # Each rank receives its rows from all ranks and adds them in the order of the ranks: the same bytes as a
        # reduce-scatter, any counts, the same bits on every run.
        parts = wire.new_empty((self.size * counts[self.rank], *x.shape[1:]))
        dist.all_to_all_single(parts, wire, [counts[self.rank]] * self.size, list(counts), group=self._group)
        torch.sum(parts.unflatten(0, (self.size, counts[self.rank])), dim=0, out=own)
        return own.to(x.device)

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        out = self._wire(x).clone()
        if out.numel():
            dist.all_reduce(out, op=_REDUCE_OPS[op], group=self._group)
        return out.to(x.device)

    def _broadcast(self, x: Tensor, root: int) -> Tensor:
        out = self._wire(x).clone()
        if out.numel():
            dist.broadcast(out, group=self._group, group_src=root)
        return out.to(x.device)

    def _reduce(self, x: Tensor, root: int) -> Tensor:
        out = self._wire(x).clone()
        if out.numel():
            dist.reduce(out, op=dist.ReduceOp.SUM, group=self._group, group_dst=root)
        # Away from the root the buffer holds partial sums.
        return out.to(x.device) if self.rank == root else torch.zeros_like(x)


def _not_a_member() -> str:
    return (
        f"global rank {dist.get_rank()} is not a member of the group it was given; "
        "each rank passes the group that it belongs to"
    )
