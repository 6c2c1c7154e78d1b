"""NCCL's manners over gloo: inside `strict`, process groups refuse what NCCL refuses.

Tensors of the CPU take the place of CUDA tensors, so the library takes every path that it takes on NCCL: nothing is
read on the host, equal parts are gathered and reduced in one operation, messages have no tags. What gloo allows and
NCCL does not is an error:

    a tensor that is not contiguous, or of a dtype that NCCL does not know
    ranks that make different calls of the group, compared by way of the store
    messages one by one that oppose each other: a message ends when the other rank has taken it, and those of two ranks
    take place one after the other, so ranks that both send first wait for each other until the timeout

Tensors of the host are not told apart from those of the device: here both are on the CPU. With fake tensors they are:
`test_backends` shows that every operation of the transport gives NCCL tensors of the device.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wholebatch.comm import _c10d, backends, torch_distributed

NCCL_DTYPES = (
    torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
_ONE_BY_ONE, _AT_ONCE, _TAKEN = 1, 2, 3  # tags on gloo, which NCCL has not


_KEPT: list[Any] = []


class RefusedError(RuntimeError):
    """NCCL would refuse this, or do something undefined."""


class _Work:
    """A handle of c10d, of an operation that runs on a thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> bool:
        self._future.result()
        return True


class StrictCalls:
    """The functions of `torch.distributed` that move tensors, with NCCL's rules; everything else is unchanged."""

    def __init__(self) -> None:
        self._streams: dict[Any, ThreadPoolExecutor] = {}
        self._numbers: dict[str, itertools.count[int]] = defaultdict(itertools.count)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    # Collectives: all ranks of the group make the same call.

    def broadcast(self, x: Tensor, **options: Any) -> Any:
        self._enter("broadcast", options, x, options["group_src"])
        return dist.broadcast(x, **options)

    def all_reduce(self, x: Tensor, **options: Any) -> Any:
        self._enter("all_reduce", options, x, str(options["op"]))
        return dist.all_reduce(x, **options)

    def reduce(self, x: Tensor, **options: Any) -> Any:
        self._enter("reduce", options, x, options["group_dst"])
        return dist.reduce(x, **options)

    def all_to_all_single(self, out: Tensor, x: Tensor, *counts: Any, **options: Any) -> Any:
        accepted(out)
        self._enter("all_to_all", options, x, shape=x.shape[1:])
        return dist.all_to_all_single(out, x, *counts, **options)

    def all_gather_single(self, out: Tensor, x: Tensor, **options: Any) -> Any:
        accepted(out)
        self._enter("all_gather", options, x)
        return _ORIGINAL["all_gather_single"](out, x, **options)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, **options: Any) -> Any:
        accepted(out)
        self._enter("reduce_scatter", options, x)
        return _ORIGINAL["reduce_scatter_single"](out, x, **options)

    def _enter(self, name: str, options: Any, x: Tensor, *details: Any, shape: Any = None) -> None:
        """Compare this call of the group with the other ranks' calls of the same number."""
        accepted(x)
        group = options["group"] or dist.group.WORLD
        key = f"{group.group_name}/{next(self._numbers[group.group_name])}"
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return
        mine = f"{name} {x.dtype} {tuple(x.shape if shape is None else shape)} {details}"
        self._store.set(f"{key}/{dist.get_rank()}", mine)
        for rank, theirs in zip(ranks, self._store.multi_get([f"{key}/{rank}" for rank in ranks]), strict=True):
            if theirs.decode() != mine:
                raise RefusedError(
                    f"NCCL waits forever or mixes data: rank {rank} calls {theirs.decode()}, this rank {mine}"
                )

    @cached_property
    def _store(self) -> Any:
        """A store in rank 0's process, which outlives the other ranks' calls; files would take milliseconds a call."""
        first, ours = dist.get_rank() == 0, dist.distributed_c10d._get_default_store()
        if first:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            _KEPT.append(store)  # other ranks may still compare their calls when this one has made all of its own
            ours.set("strict/port", str(store.port))
            return store
        return dist.TCPStore("127.0.0.1", int(ours.get("strict/port")), is_master=False, timeout=ours.timeout)

    # Messages: one stream for each pair of ranks, and one for messages that are given at once.

    def isend(self, x: Tensor, *, group: Any, group_dst: int, tag: int = 0) -> _Work:
        accepted(x)

        def send() -> None:
            dist.send(x, group=group, group_dst=group_dst, tag=_ONE_BY_ONE)
            dist.recv(torch.empty(1), group=group, group_src=group_dst, tag=_TAKEN)

        return self._on_stream((group, group_dst), send)

    def irecv(self, x: Tensor, *, group: Any, group_src: int, tag: int = 0) -> _Work:
        accepted(x)

        def receive() -> None:
            dist.recv(x, group=group, group_src=group_src, tag=_ONE_BY_ONE)
            dist.send(torch.zeros(1), group=group, group_dst=group_src, tag=_TAKEN)

        return self._on_stream((group, group_src), receive)

    def P2POp(self, operation: Any, x: Tensor, *, group: Any, group_peer: int) -> Any:  # noqa: N802  # torch's name
        accepted(x)
        return operation == self.isend, x, group, group_peer

    def batch_isend_irecv(self, operations: list[Any]) -> list[_Work]:
        def run() -> None:
            works = [
                dist.isend(x, group=group, group_dst=peer, tag=_AT_ONCE)
                if sends
                else dist.irecv(x, group=group, group_src=peer, tag=_AT_ONCE)
                for sends, x, group, peer in operations
            ]
            for work in works:
                work.wait()

        return [self._on_stream(operations[0][2], run)]

    def _on_stream(self, key: Any, act: Any) -> _Work:
        if key not in self._streams:
            self._streams[key] = ThreadPoolExecutor(max_workers=1)
        return _Work(self._streams[key].submit(act))


def accepted(x: Tensor, device_type: str = "cpu") -> None:
    """Raise RefusedError unless NCCL takes such a tensor; `device_type` takes the place of "cuda"."""
    if x.device.type != device_type:
        raise RefusedError(f"NCCL takes tensors of the device only, got one on {x.device}")
    if not x.is_contiguous():
        raise RefusedError(f"NCCL takes contiguous tensors only, got strides {x.stride()} of shape {tuple(x.shape)}")
    if x.dtype not in NCCL_DTYPES:
        raise RefusedError(f"NCCL does not know {x.dtype}")


_ORIGINAL = {name: getattr(_c10d, name) for name in ("all_gather_single", "reduce_scatter_single")}


class _StrictNames:
    """`comm._c10d` with the strict functions."""

    def __init__(self, calls: StrictCalls) -> None:
        self.all_gather_single, self.reduce_scatter_single = calls.all_gather_single, calls.reduce_scatter_single

    def __getattr__(self, name: str) -> Any:
        return getattr(_c10d, name)


class StrictBackends(backends.Backends):
    """The CPU takes the place of a device, and there is no host."""

    def on_device(self, device_type: str) -> bool:
        return True

    @property
    def may_abort(self) -> bool:
        return False


def strict(patch: Any) -> None:
    """Let all communicators that are made from now on be strict; `patch` sets attributes, as pytest's monkeypatch."""
    calls = StrictCalls()
    patch.setattr(torch_distributed, "dist", calls)
    patch.setattr(torch_distributed, "_c10d", _StrictNames(calls))
    patch.setattr(torch_distributed, "Backends", StrictBackends)
