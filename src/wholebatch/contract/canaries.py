"""Canaries: numbers of a step, still on the device, that show a mistake to all ranks at the entry of the next call.

The next handshake of the group reads them along with its other numbers: nothing waits for them. One counts backward
passes that were not the same on all ranks (see `reduction`); the others are those of kernels, which must be equal.

A check at first use (see `nodes.kernel_check`) misses faults that only large tiles show, or only some steps. So one
call in kernels of `EVERY` computes a few sums twice, by different ways, on the device:

    sum_i (sum_j E_ij) = sum_j (sum_i E_ij)        of each launch that sums both rows and columns
    <X, U> = <Y, V>                                U = dS Y and V = dS^T X, summed over the ranks

If they differ, all ranks raise, and do without kernels from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..kernels import choice

_SUMS, _BY_ROWS, _BY_COLUMNS, _SIZE = (
    f"canary of kernels: {name}" for name in ("sums", "<X, U>", "<Y, V>", "size of both")
)
CANARIES = (_SUMS, _BY_ROWS, _BY_COLUMNS, _SIZE)
EARLIER = "earlier backward passes that differed"
OVERFLOW = (
    "a GradScaler has found an overflow on one rank alone and skipped the step there, so the weights have parted: "
    "resume from a checkpoint, and call wholebatch.heads.agree_on_overflow(scaler, *optimizers) after scaler.unscale_"
)
_TOLERANCE = 1e-3  # of sums in float32, whose errors are below 1e-5 of their size


Products: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # X, U, and the divisors of X's rows


EVERY = 101  # calls in kernels, of which one computes them: a prime, for a step that makes several calls


class Canaries:
    """The canaries of a group's ranks that no handshake has read yet."""

    def __init__(self) -> None:
        self.kernel_numbers: dict[str, Tensor] = {}
        self.differed: Tensor | None = None  # the number of backward passes that differed; None: nothing to read
        self._calls = 0

    def due(self) -> Canaries | None:
        """Return these canaries in one call of `EVERY`; else None."""
        self._calls += 1
        return self if self._calls % EVERY == 0 else None

    def note_sums(self, difference: Tensor) -> None:
        """Note the largest relative difference between sums by rows and by columns, ()."""
        before = self.kernel_numbers.get(_SUMS)
        self.kernel_numbers[_SUMS] = difference if before is None else torch.maximum(before, difference)

    @torch.no_grad()
    def note_products(self, row_products: Products, column_products: Products) -> None:
        """Note <X, U> and <Y, V> of this rank, whose sums over the ranks are equal."""
        by_rows, size = _inner(*row_products)
        for name, number in ((_BY_ROWS, by_rows), (_BY_COLUMNS, _inner(*column_products)[0]), (_SIZE, size)):
            self.kernel_numbers[name] = self.kernel_numbers[name] + number if name in self.kernel_numbers else number

    def numbers(self) -> dict[str, Tensor]:
        """Return the numbers, still on the device, for the next handshake."""
        return {**({} if self.differed is None else {EARLIER: self.differed}), **self.kernel_numbers}

    def check(self, rank_numbers: Mapping[str, Sequence[float]] | None) -> None:
        """Raise RuntimeError, on all ranks, if numbers of kernels that a handshake has read contradict each other.

        None stands for different numbers on different ranks, which say nothing.
        """
        self.kernel_numbers.clear()
        if rank_numbers is None:
            return
        sums = max(rank_numbers.get(_SUMS, [0.0]))
        by_rows, by_columns, size = (sum(rank_numbers.get(name, [0.0])) for name in (_BY_ROWS, _BY_COLUMNS, _SIZE))
        if math.isfinite(sums) and sums > _TOLERANCE:
            _raise(f"sums over rows and over columns differ by {sums:.3g} of them (tile_sums)")
        if math.isfinite(size) and abs(by_rows - by_columns) > _TOLERANCE * size:
            _raise(f"<X, U> is {by_rows:.7g} and <Y, V> is {by_columns:.7g} (tile_gradient and its products)")

    def check_differed(self, count: float) -> None:
        """Raise ValueError if ranks have read that some backward passes differed: on all ranks, which read the same."""
        self.differed = None
        if count:
            raise ValueError(
                "an earlier backward pass was not the same on all ranks: they were in the backward passes of different "
                "losses or calls, or had different incoming gradients; the gradients of that step are NaN. Run the "
                "same backward passes in the same order on all ranks, and multiply the loss by the same factors. Or "
                f"{OVERFLOW}"
            )


def _inner(x: Tensor, u: Tensor, divided_by: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return <X, U>, and the sum of |x_i| |u_i|, in float32, some rows at a time."""
    total, size = u.new_zeros(()), u.new_zeros(())
    step = 2**24 // max(1, x.shape[1])
    for start in range(0, len(x), step):
        a, b = x[start : start + step].to(u.dtype), u[start : start + step]
        if divided_by is not None:
            a = a / divided_by[start : start + step]
        total += torch.linalg.vecdot(a, b).sum()
        size += (torch.linalg.vector_norm(a, dim=1) * torch.linalg.vector_norm(b, dim=1)).sum()
    return total, size


def _raise(mistake: str) -> None:
    choice.switch_off(f"results of an earlier call contradicted each other: {mistake}")
    raise RuntimeError(
        f"Triton kernels gave results that contradict each other in an earlier call: {mistake}. The gradients of that "
        "step are wrong; go back to a checkpoint before it. Kernels are now off in this process: kernel='auto' "
        "goes on in plain PyTorch. Please report this with the output of `wholebatch doctor`"
    )
