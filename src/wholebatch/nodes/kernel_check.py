"""The first call of a form: kernels are compiled, checked and timed, and the ranks choose together.

A card on which nobody has run these kernels may compile them wrongly, or not at all. So before the first call of a form
(see `kernels.choice`) starts a kernel, each rank runs the call's own sweep on small random features, with the call's
own pairs:

1. ragged tiles of a few programs, and more programs than the GPU runs at a time: each launch is repeated between NaN,
   and compared with float64 (see `kernels.verify`)
2. for kernel="auto", one sweep of a part of the call's size in kernels, and one in plain PyTorch: the time of each
3. one handshake: kernels compute if they passed on all ranks, and if they were faster on the slowest rank

This takes the time that compilers take, and some milliseconds, once. It draws from a generator of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import Facts
from ..kernels import Choice, choice, interpreted, verifying

_LONGEST_MESSAGE = 500
_TIMED, _REPEATED = 4096, 3  # rows and columns of the sweeps that are timed; their number


@dataclass(frozen=True)
class Sizes:
    """The size of a rehearsal.

    Args:
        rows, cols: of S, at most.
        side: of a tile, at most.
    """

    rows: int
    cols: int
    side: int


class Rehearsal(Protocol):
    """The sweep of a call on random features."""

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep, forward and backward, in kernels or in plain PyTorch."""
        ...


def use_kernels(facts: Facts, form: Hashable, rehearsal: Rehearsal) -> bool:
    """Return whether kernels compute a call's tiles, the same on all ranks. Collective at the first call of a form.

    Args:
        facts: of the call.
        form: what decides which kernels are started, the same on all ranks.
        rehearsal: the sweep of the call.

    Raises:
        ValueError: on every rank, for kernel="triton", if kernels failed on any of them.
    """
    if not facts.kernels:
        return False
    group, named = facts.comm.transport.group_name, facts.options.kernel == "triton"
    described = f"{_name(facts.given_dtype)} x {facts.embedding_size}, {facts.products.precision}"
    rows = max(partition.total for partition in facts.rows.values())
    # With kernel="triton", nothing depends on the number of rows, but for tiles of more programs than one.
    key = (facts.caller, described, named, rows.bit_length(), facts.differentiable, facts.device.type, form)
    if (known := choice.found(group, key)) is not None:
        return known.in_kernels
    found = _rehearse(facts, rehearsal, timed=not named)

    def state() -> dict[str, Any]:
        if named and found["failed"]:
            raise ValueError(
                f"kernel='triton' failed its check on rank {facts.rank}: {found['failed']}; please report this with "
                "the output of `wholebatch doctor`, and pass kernel='auto' or kernel='torch'"
            )
        return found

    by_rank = facts.comm.handshake(state, caller=f"{facts.caller}: check of kernels")
    failed = [(rank, why) for rank, why in enumerate(by_rank.column("failed")) if why]
    in_kernels, in_pytorch = (max(by_rank.column(name)) for name in ("milliseconds", "in PyTorch"))
    passed = tuple(sorted({*" ".join(by_rank.column("passed")).split()}))
    why, times = "", None
    if failed:
        why = f"their check failed on rank {failed[0][0]}: {failed[0][1]}"
    elif not passed:
        why = "no kernel computes this form"
    elif not named:
        times = in_kernels, in_pytorch
        why = "" if in_kernels < in_pytorch else "it was faster"
    form_in_words = f"{described}, about {2 ** rows.bit_length()} rows"
    made = Choice(facts.caller, form_in_words, not why, why, passed, times, failed=bool(failed))
    choice.note(group, key, made, reports=facts.rank == 0)
    return made.in_kernels


def _rehearse(facts: Facts, rehearsal: Rehearsal, *, timed: bool) -> dict[str, Any]:
    """Return the kernels that passed, why one failed, and the times of sweeps: facts for a handshake."""
    found: dict[str, Any] = {"passed": "", "failed": "", "milliseconds": 0.0, "in PyTorch": 0.0}
    try:
        with verifying() as passed:
            for sizes in _sizes(facts.device):
                rehearsal(sizes, in_kernels=True)()
        found["passed"] = " ".join(sorted({*passed}))
        if timed and passed:
            sizes = Sizes(_TIMED, _TIMED, _TIMED)
            for name, in_kernels in (("milliseconds", True), ("in PyTorch", False)):
                found[name] = _milliseconds(rehearsal(sizes, in_kernels=in_kernels), facts.device)
    except Exception as error:  # compilers, drivers and file systems raise anything: plain PyTorch does without them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        found["failed"] = reason if len(reason) <= _LONGEST_MESSAGE else f"{reason[:_LONGEST_MESSAGE]}..."
    return found


def _sizes(device: torch.device) -> list[Sizes]:
    """Return the sizes of sweeps that are compared with float64: a few ragged tiles, and more than a wave of programs.

    Programs compute 128 x 128 entries or fewer on most GPUs, and an SM runs two at a time at most.
    """
    if device.type != "cuda" or interpreted():
        return [Sizes(45, 77, 20)]
    programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    side = 128 * (int(programs**0.5) + 2)
    return [Sizes(300, 500, 140), Sizes(side, side, side)]


def _milliseconds(sweep: Callable[[], None], device: torch.device) -> float:
    """Return the shortest time of a sweep, after one that is not counted."""
    times = []
    for _ in range(1 + _REPEATED):
        start = _now(device)
        sweep()
        times.append(1000 * (_now(device) - start))
    return min(times[1:])


def _now(device: torch.device) -> float:
    """Return the time at which all work that was started is done, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def random_rows(rows: int, dim: int, like: Tensor, seed: int) -> Tensor:
    """Return random rows of unit length, in a tensor's dtype and on its device, from a generator of their own."""
    generator = torch.Generator(like.device).manual_seed(seed)
    made = torch.randn(rows, dim, generator=generator, device=like.device)
    return torch.nn.functional.normalize(made, dim=1).to(like)


def random_numbers(count: int, device: torch.device, seed: int) -> Tensor:
    """Return random numbers from 0.5 to 1.5, (count,), float32, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator, device="cpu") + 0.5).to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
