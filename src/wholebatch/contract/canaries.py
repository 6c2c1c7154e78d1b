"""Canaries of kernels: numbers of a call that must be equal, compared on all ranks at the entry of the next call.

A check at first use (see `nodes.kernel_check`) misses faults that only large tiles show, or only some steps. So one
call in kernels of `EVERY` computes a few sums twice, by different ways, on the device:

    sum_i (sum_j E_ij) = sum_j (sum_i E_ij)        of each launch that sums both rows and columns
    <X, U> = <Y, V>                                U = dS Y and V = dS^T X, summed over the ranks

The next handshake of the group reads them along with its other numbers: nothing waits for them. If they differ, all
ranks raise, and do without kernels from then on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ..comm.transport import Transport
from ..kernels import choice

_SUMS, _BY_ROWS, _BY_COLUMNS, _SIZE = (
    f"canary of kernels: {name}" for name in ("sums", "<X, U>", "<Y, V>", "size of both")
)
CANARIES = (_SUMS, _BY_ROWS, _BY_COLUMNS, _SIZE)
_TOLERANCE = 1e-3  # of sums in float32, whose errors are below 1e-5 of their size


Products: TypeAlias = tuple[Tensor, Tensor, Tensor | None]  # X, U, and the divisors of X's rows


EVERY = 101  # calls in kernels, of which one computes them: a prime, for a step that makes several calls


class Canaries:
    """The canaries of a group's ranks that no handshake has read yet."""

    def __init__(self) -> None:
        self._numbers: dict[str, Tensor] = {}
        self._calls = 0

    def due(self) -> Canaries | None:
        """Return these canaries in one call of `EVERY`; else None."""
        self._calls += 1
        return self if self._calls % EVERY == 0 else None

    def note_sums(self, difference: Tensor) -> None:
        """Note the largest relative difference between sums by rows and by columns, ()."""
        before = self._numbers.get(_SUMS)
        self._numbers[_SUMS] = difference if before is None else torch.maximum(before, difference)

    @torch.no_grad()
    def note_products(self, of_rows: Products, of_columns: Products) -> None:
        """Note <X, U> and <Y, V> of this rank, whose sums over the ranks are equal."""
        by_rows, size = _inner(*of_rows)
        for name, number in ((_BY_ROWS, by_rows), (_BY_COLUMNS, _inner(*of_columns)[0]), (_SIZE, size)):
            self._numbers[name] = self._numbers[name] + number if name in self._numbers else number

    @property
    def pending(self) -> bool:
        """Whether there are numbers for the next handshake."""
        return bool(self._numbers)

    def numbers(self) -> Mapping[str, Tensor]:
        """Return the numbers, still on the device, for the next handshake."""
        return dict(self._numbers)

    def check(self, of_ranks: Mapping[str, Sequence[float]] | None) -> None:
        """Raise RuntimeError, on all ranks, if numbers that a handshake has read contradict each other.

        None stands for different numbers on different ranks, which say nothing.
        """
        self._numbers.clear()
        if of_ranks is None:
            return
        sums = max(of_ranks.get(_SUMS, [0.0]))
        by_rows, by_columns, size = (sum(of_ranks.get(name, [0.0])) for name in (_BY_ROWS, _BY_COLUMNS, _SIZE))
        if math.isfinite(sums) and sums > _TOLERANCE:
            _raise(f"sums over rows and over columns differ by {sums:.3g} of them (tile_sums)")
        if math.isfinite(size) and abs(by_rows - by_columns) > _TOLERANCE * size:
            _raise(f"<X, U> is {by_rows:.7g} and <Y, V> is {by_columns:.7g} (tile_gradient and its products)")


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


def canaries_of(transport: Transport) -> Canaries:
    """Return the canaries of a group's ranks."""
    return transport.kept_as("canaries of kernels", Canaries)
