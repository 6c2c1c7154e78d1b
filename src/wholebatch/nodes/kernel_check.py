"""The first call of a form: kernels are compiled, checked and timed, and the ranks choose together.

A card on which nobody has run these kernels may compile them wrongly, or not at all. So before the first call of a form
(see `kernels.choice`) starts a kernel, each rank runs the call's own node on random features, with the call's own
pairs:

1. ragged tiles of a few programs, and more programs than the GPU runs at a time: each launch is repeated between NaN,
   and compared with float64 (see `kernels.verify`)
2. for kernel="auto", a sweep of the call's own size in kernels, and one in plain PyTorch: the time of each, with that
   of the host
3. one handshake: kernels compute if they passed on all ranks, and if they were faster on the slowest rank, or slower by
   less than a tenth: a difference that another run might measure the other way around

This takes the time that compilers take, and some milliseconds, once on a machine: a rank keeps the results of steps 1
and 2 (see `kernels.verdicts`). In a later run, one sweep that is neither checked nor timed replaces them, so that a
kernel that does not start any more, for want of a compiler, is noticed before the handshake. A failure is not kept: its
cause, such as a full disk, may be gone next time. All this draws from random generators of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..contract import KERNELS, Facts
from ..kernels import READABLE, Choice, check_angles, check_rows, choice, interpreted, verdicts, verifying
from .route import Layout

_LONGEST_MESSAGE = 500
_REPEATED = 3  # sweeps that are timed
_CLASSES = 28  # of size: up to 2^28 = 16384^2 entries, and one for all larger ones
_ALIKE = 1.1  # times slower


@dataclass(frozen=True)
class Sizes:
    """The size of a rehearsal."""

    # rows, cols: of S, at most
    rows: int
    cols: int
    side: int  # of a tile, at most
    # as_called: whether exponentials are kept as in the call, or in each way in which calls of the form keep them
    as_called: bool = False


class Rehearsal(Protocol):
    """The sweep of a call on random features."""

    @property
    def layout(self) -> Layout:
        """The owners of the rows and columns of the call, those of tokens in late interaction."""
        ...

    def __call__(self, sizes: Sizes, *, in_kernels: bool) -> Callable[[], None]:
        """Return a function that makes one sweep, forward and backward, in kernels or in plain PyTorch."""
        ...


def use_kernels(facts: Facts, form: Hashable, layout: Layout, rehearse: Callable[[], Rehearsal]) -> bool:
    """Return whether kernels compute a call's tiles, the same on all ranks. Collective at the first call of a form.

    The form, the same on all ranks, decides which kernels are started; its first call is rehearsed.

    Raises:
        ValueError: on every rank, for kernel="triton", if kernels failed on any of them.
    """
    if not facts.kernels:
        return False
    group, named = facts.comm.transport.group_name, facts.options.kernel == "triton"

    def in_full() -> tuple[str, int, Hashable]:
        described = f"{_name(facts.given_dtype)} x {facts.embedding_size}, {facts.products.precision}"
        size = _class_of(max(layout.rows.counts) * layout.cols.total)
        precision = facts.products, facts.features_dtype
        key = (facts.caller, described, precision, named, size, facts.differentiable, facts.device.type, form)
        return described, size, key

    products = facts.products
    product_settings = products.precision, products.named, products.units, facts.features_dtype
    call_form = "choice", form, layout.rows.counts, layout.cols.counts, *product_settings, facts.differentiable
    described, size, key = facts.once(call_form, in_full)
    if (known := choice.found(group, key)) is not None:
        facts.plans[KERNELS] = known.in_kernels
        return known.in_kernels
    result = _rehearse(facts, rehearse(), key, timed=not named)

    def state() -> dict[str, Any]:
        if named and result["failed"]:
            raise ValueError(
                f"kernel='triton' failed its check on rank {facts.rank}: {result['failed']}; please report this with "
                "the output of `wholebatch doctor`, and pass kernel='auto' or kernel='torch'"
            )
        return result

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
        why = "" if in_kernels <= _ALIKE * in_pytorch else "it was faster"
    form_in_words = f"{described}, {'up to' if size < _CLASSES else 'about'} 2^{size} entries a rank"
    decision = Choice(facts.caller, form_in_words, not why, why, passed, times, bool(failed), result["cached"])
    choice.note(group, key, decision, reports=facts.rank == 0)
    facts.plans[KERNELS] = decision.in_kernels
    return decision.in_kernels


def _class_of(entries: int) -> int:
    """Return the class of a size: the exponent of the least power of two that is not smaller, at most `_CLASSES`."""
    return min((max(entries, 1) - 1).bit_length(), _CLASSES)


def _rehearse(facts: Facts, rehearsal: Rehearsal, key: Hashable, *, timed: bool) -> dict[str, Any]:
    """Return the kernels that passed, why one failed, and the times of sweeps: facts for a handshake.

    With them is whether these are the results of an earlier run.
    """
    trial: dict[str, Any] = {"passed": "", "failed": "", "milliseconds": 0.0, "in PyTorch": 0.0, "cached": False}
    layout, checked = rehearsal.layout, _sizes(facts.device)
    rows, cols = layout.rows.counts[facts.rank], layout.cols.total
    as_called = _as_called(rows, cols)
    # A rank with a few rows checks less than others. Its verdict is not theirs.
    size_classes = [_class_of(n) for n in (min(rows, checked[-1].rows), min(cols, checked[-1].cols), rows * cols)]
    form = repr((key, *size_classes))
    try:
        if (verdict := verdicts.read(facts.device, form)) is not None:
            rehearsal(as_called, in_kernels=True)()
            _finish_time(facts.device)
            return {**trial, **verdict, "cached": True}
        with verifying() as passed:
            for sizes in checked:
                rehearsal(sizes, in_kernels=True)()
            if passed and facts.features_dtype in READABLE:
                like = torch.empty(0, dtype=facts.features_dtype, device=facts.device)
                x, y = (random_rows(n, facts.embedding_size, like, seed) for seed, n in enumerate((45, 77)))
                check_rows(x, y)
                if layout.replicated:  # rows are centers of classes
                    for index in (None, torch.arange(len(y), device=y.device).flip(0)):
                        check_angles(x.float(), y.float() if y.dtype == torch.float16 else y, index)
        trial["passed"] = " ".join(sorted({*passed}))
        if timed and passed:
            for name, in_kernels in (("milliseconds", True), ("in PyTorch", False)):
                trial[name] = _milliseconds(rehearsal(as_called, in_kernels=in_kernels), facts.device)
        if passed:
            verdicts.write(facts.device, form, {name: trial[name] for name in ("passed", "milliseconds", "in PyTorch")})
    except Exception as error:  # compilers, drivers and file systems raise anything: plain PyTorch does without them
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        trial["failed"] = reason if len(reason) <= _LONGEST_MESSAGE else f"{reason[:_LONGEST_MESSAGE]}..."
    return trial


def _as_called(rows: int, cols: int) -> Sizes:
    """Return the size of a call with these rows and columns, in its proportions, with 2^28 entries at most."""
    most = 2**_CLASSES
    rows = max(1, int(rows * min(1.0, (most / max(rows * cols, 1)) ** 0.5)))
    cols = min(cols, most // rows)
    return Sizes(rows, cols, max(rows, cols), as_called=True)


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
        start = _finish_time(device)
        sweep()
        times.append(1000 * (_finish_time(device) - start))
    return min(times[1:])


def _finish_time(device: torch.device) -> float:
    """Return the time at which all work that was started is done, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def random_rows(rows: int, dim: int, like: Tensor, seed: int) -> Tensor:
    """Return random rows of unit length, in a tensor's dtype and on its device, from a generator of their own."""
    generator = torch.Generator(like.device).manual_seed(seed)
    numbers = torch.randn(rows, dim, generator=generator, device=like.device)
    return torch.nn.functional.normalize(numbers, dim=1).to(like)


def random_numbers(count: int, device: torch.device, seed: int) -> Tensor:
    """Return random numbers from 0.5 to 1.5, (count,), float32, from a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator, device="cpu") + 0.5).to(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
