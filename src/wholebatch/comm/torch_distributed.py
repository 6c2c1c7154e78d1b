"""Communicate over a torch.distributed process group of any backend, with uneven rows too."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from . import _c10d
from .backends import Backends
from .communicator import Communicator
from .maps import Loss
from .point_to_point import SIZE_CLASSES
from .transport import MOST_PARTS, Finish, Message, Transport, done

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


# What all communicators over a group share.
_KEPT: WeakKeyDictionary[dist.ProcessGroup, dict[str, Any]] = WeakKeyDictionary()


class TorchTransport(Transport):
    """Move bytes over a process group."""

    max_tag = 2**31 - 1

    def __init__(self, group: dist.ProcessGroup | None, *, made_by_split: bool = False) -> None:
        world: Any = dist.group.WORLD
        self._world, self._group = world, world if group is None else group
        super().__init__(_KEPT.setdefault(self._group, {}))
        self.group_name = self._group.group_name
        self._made_by_split, self._process = made_by_split, os.getpid()
        self._unclosed: finalize[..., TorchTransport] | None = None  # see `split`
        self._device: torch.device | None = None  # see `use_device`
        self.rank, self.size, self._backends = self.kept_as(
            "rank, size and backends", lambda: (dist.get_rank(group), dist.get_world_size(group), Backends.of(group))
        )
        self.size_classes = SIZE_CLASSES if self._backends.may_abort else 1

    @property
    def group(self) -> Any:
        """The process group; a ValueError after `close`."""
        self.check_not_closed()
        return self._group

    def check_open(self) -> None:
        self.check_not_closed()
        if not self._is_alive():
            raise ValueError(
                "the process group of this communicator has been destroyed; make a new communicator after "
                "torch.distributed.init_process_group()"
            )

    def _is_alive(self) -> bool:
        forked = os.getpid() != self._process  # a forked process has none of the group's threads
        if forked or not dist.is_initialized() or dist.group.WORLD is not self._world:
            return False
        try:
            return dist.get_rank(self._group) >= 0
        except ValueError:  # torch has no record of the group
            return False

    def split(self, members: Sequence[int], *, member: bool, name: str) -> TorchTransport | None:
        if not member:
            return None
        ranks = [dist.get_global_rank(self.group, member) for member in members]
        with _c10d.next_group_is_named(name):
            group = dist.new_group(ranks, timeout=self._timeout(), use_local_synchronization=True)
        part, twin = (TorchTransport(group, made_by_split=True) for _ in range(2))
        if not any(map(part._backends.on_device, part._backends.by_device)):  # there, operations may be under way
            dist.barrier(group=group)  # a rank that drops its part at once would end what others still connect to
            part._unclosed = finalize(part, twin.close)
            part._unclosed.atexit = False
        return part

    @property
    def ends_with_close(self) -> bool:
        return self._made_by_split and not self.closed and self._is_alive()

    def close(self) -> None:
        """Also drop the process group: its threads and descriptors end with the last reference to it."""
        if self._unclosed is not None:
            self._unclosed.detach()  # it refers to the group
        if self.ends_with_close:
            dist.destroy_process_group(self._group)
        super().close()
        self._group = self._world = None

    def _timeout(self) -> timedelta | None:
        """Return the timeout of this group's operations, for its parts; None where torch does not show it."""
        try:
            device = torch.device(next(iter(self._backends.by_device)))
            return self.group._get_backend(device).options._timeout
        except (AttributeError, RuntimeError):
            return None

    def all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        wire = self._wire(x)
        out = wire.new_empty((sum(counts), *x.shape[1:]))
        if not out.numel():
            return done(out.to(x.device))
        if len(set(counts)) == 1 and self.stays_on_device(wire):
            works = [_c10d.all_gather_single(out, wire, group=self.group, async_op=True)]
        elif self.stays_on_device(wire) and _is_worth_padding(counts):
            return self._padded_all_gather(wire, counts, x.device)
        else:
            # On the CPU, broadcasts into the slices beat gloo's all-gather, need no padding, and take any counts.
            works = [work for rank_works in self._broadcasts(wire, out, counts) for work in rank_works]
        return _finisher(works, lambda: out.to(x.device), wire)

    def _padded_all_gather(self, wire: Tensor, counts: tuple[int, ...], device: torch.device) -> Finish:
        """Gather parts of one size, the largest; the rows beyond a rank's own are dropped on arrival."""
        most = max(counts)
        padded = wire.new_empty((most, *wire.shape[1:]))
        padded[: len(wire)] = wire
        out = wire.new_empty((self.size, *padded.shape))
        work = _c10d.all_gather_single(out.flatten(0, 1), padded, group=self.group, async_op=True)
        return _finisher(
            [work],
            lambda: torch.cat([part[:n] for part, n in zip(out, counts, strict=True)]).to(device),
            padded,
        )

    def all_gather_statements(self, x: Tensor) -> Finish:
        # gloo distinguishes its all-gather from the broadcasts that move features: a rank that is elsewhere makes the
        # others time out, and does not write its features over their statements or break their connections.
        wire = self._wire(x)
        out = wire.new_empty((self.size, *x.shape[1:]))
        works = [_c10d.all_gather_single(out, wire, group=self.group, async_op=True)]
        return _finisher(works, lambda: out.to(x.device), wire)

    def stays_on_device(self, x: Tensor) -> bool:
        return self._backends.on_device(x.device.type)

    def keeps_tags(self, x: Tensor) -> bool:
        return not self._backends.on_device(self._wire_device(x).type)

    def use_device(self, device: torch.device) -> None:
        if self._backends.on_device(device.type):
            self._device = device

    def all_gather_by_rank(self, x: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, list[Finish]]:
        if self._wire(x) is not x:
            return super().all_gather_by_rank(x, counts)
        out = x.new_empty((sum(counts), *x.shape[1:]))
        return out, [_finisher(rank_works, lambda: out, x) for rank_works in self._broadcasts(x, out, counts)]

    def _broadcasts(self, wire: Tensor, out: Tensor, counts: tuple[int, ...]) -> list[list[Any]]:
        """Broadcast each rank's rows into their place in `out`; return c10d's handles, by rank."""
        works: list[list[Any]] = []
        for root, part in enumerate(out.split_with_sizes(counts)):
            if root == self.rank:
                part.copy_(wire)
            some = part.numel() > 0
            works.append([dist.broadcast(part, group=self.group, group_src=root, async_op=True)] if some else [])
        return works

    def reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Finish:
        wire = self._wire(x)
        local = (counts[self.rank], *x.shape[1:])
        if len(set(counts)) == 1 and self.stays_on_device(wire):
            out = wire.new_empty(local)
            work = _c10d.reduce_scatter_single(out, wire, group=self.group, async_op=True)
            return _finisher([work], lambda: out.to(x.device), wire)
        # Each rank receives its rows from all ranks and adds them in the order of the ranks: the same bytes as a
        # reduce-scatter, any counts, the same bits on every run.
        parts = self.all_to_all(wire, counts, (counts[self.rank],) * self.size)
        return lambda: parts().unflatten(0, (self.size, local[0])).sum(0, dtype=x.dtype).to(x.device)

    def all_reduce(self, x: Tensor, op: str) -> Finish:
        return self._on_a_copy(x, dist.all_reduce, op=_REDUCE_OPS[op])

    def broadcast(self, x: Tensor, root: int) -> Finish:
        return self._on_a_copy(x, dist.broadcast, group_src=root)

    def reduce(self, x: Tensor, root: int) -> Finish:
        finish = self._on_a_copy(x, dist.reduce, op=dist.ReduceOp.SUM, group_dst=root)

        def reduced() -> Tensor:
            y = finish()
            return y if self.rank == root else torch.zeros_like(x)  # away from the root y has partial sums

        return reduced

    def reduce_(self, x: Tensor, root: int) -> Finish:
        if not self.stays_on_device(x) or not x.numel():
            return self.reduce(x, root)
        work = dist.reduce(x, op=dist.ReduceOp.SUM, group=self.group, group_dst=root, async_op=True)
        return _finisher([work], lambda: x)

    def all_to_all(self, x: Tensor, send_counts: tuple[int, ...], receive_counts: tuple[int, ...]) -> Finish:
        wire = self._wire(x)
        out = wire.new_empty((sum(receive_counts), *x.shape[1:]))
        work = dist.all_to_all_single(
            out, wire, list(receive_counts), list(send_counts), group=self.group, async_op=True
        )
        return _finisher([work], lambda: out.to(x.device), wire)

    def swap(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], list[Tensor]]:
        messages = [*sends, *receives]
        if all(self.keeps_tags(message.x) or message.rank == self.rank for message in messages):
            return super().swap(sends, receives)
        # One by one, on NCCL each would wait for the one before, and ranks that all send first for each other.
        leaving, arriving = ([self._wire(message.x) for message in some] for some in (sends, receives))
        operations = [
            dist.P2POp(operation, wire, group=self.group, group_peer=message.rank)
            for operation, wires, some in ((dist.isend, leaving, sends), (dist.irecv, arriving, receives))
            for wire, message in zip(wires, some, strict=True)
            if wire.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []

        def finish(_keep: list[Tensor] = leaving) -> list[Tensor]:
            for work in works:
                work.wait()
            return [wire.to(message.x.device) for wire, message in zip(arriving, receives, strict=True)]

        return finish

    def _send(self, x: Tensor, dest: int, wire_tag: int) -> Finish:
        wire = self._wire(x)
        if not wire.numel():
            return done(x)
        return _finisher([dist.isend(wire, group=self.group, group_dst=dest, tag=wire_tag)], lambda: x, wire)

    def _recv(self, out: Tensor, source: int, wire_tag: int) -> Finish:
        wire = self._wire(out)
        if not wire.numel():
            return done(out)
        work = dist.irecv(wire, group=self.group, group_src=source, tag=wire_tag)
        return _finisher([work], lambda: wire.to(out.device))

    def _wire(self, x: Tensor) -> Tensor:
        """Return x on a device from which a backend of this group takes it."""
        return x if x.device.type == "cpu" and "cpu" in self._backends.by_device else x.to(self._wire_device(x))

    def _wire_device(self, x: Tensor) -> torch.device:
        if self._backends.take(x.device.type):
            return x.device
        if "cpu" in self._backends.by_device:
            return torch.device("cpu")
        return self._device or self._backends.home(getattr(self.group, "bound_device_id", None))

    def _on_a_copy(self, x: Tensor, operation: Callable[..., Any], **options: Any) -> Finish:
        """Start an operation that replaces its tensor, on a copy of x on the wire's device; the result is there."""
        wire = self._wire(x)
        out = wire.clone() if wire is x else wire
        works = [operation(out, group=self.group, async_op=True, **options)] if out.numel() else []
        return _finisher(works, lambda: out.to(x.device))


def _is_worth_padding(counts: tuple[int, ...]) -> bool:
    """Whether uneven parts are better gathered as even ones: more than 8 broadcasts, and at most twice the bytes."""
    return len(counts) - counts.count(0) > MOST_PARTS and max(counts) * len(counts) <= 2 * sum(counts)


def _finisher(works: Sequence[Any], result: Callable[[], Tensor], *keep: Tensor) -> Finish:
    """Return a function that waits for c10d's handles, then returns `result()`; until then, `keep` stays in memory."""

    def finish(_keep: tuple[Tensor, ...] = keep) -> Tensor:
        for work in works:
            work.wait()
        return result()

    return finish


class TorchCommunicator(Communicator):
    """The ranks of a process group.

    Args:
        group: a `ProcessGroup`, a one-dimensional `DeviceMesh`, or None for the default group as it is now.
        loss, check, trace: as for every :class:`Communicator`.

    Raises:
        ValueError: if torch.distributed is not initialized, if this rank is not in the group, or if `group` is
            something else.
    """

    def __init__(
        self, group: object = None, *, loss: Loss = "sum", check: bool | None = None, trace: bool | None = None
    ) -> None:
        if not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialized: call torch.distributed.init_process_group() first, "
                "or use LocalCommunicator() for one process"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ValueError(f"group must be a one-dimensional mesh, got {group.ndim} axes; pass mesh['axis']")
            group = group.get_group()
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(_membership_error())
        if not isinstance(group, dist.ProcessGroup | None):
            raise ValueError(f"group must be a ProcessGroup, a DeviceMesh or None; got {type(group).__name__}")
        if group is not None and dist.get_rank(group) < 0:
            raise ValueError(_membership_error())
        super().__init__(TorchTransport(group), loss=loss, check=check, trace=trace)


def _membership_error() -> str:
    return (
        f"global rank {dist.get_rank()} is not a member of the group it was given; "
        "each rank passes the group that it belongs to"
    )
