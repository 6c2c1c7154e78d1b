"""How large a tile is, and how much of exp(S) is kept for the backward pass: integers from `memory=`.

    "flat"   two tiles, whatever the batch. S is computed twice: 4 units of b B d multiply-adds for a loss that uses
             rows and columns
    bytes    of all the tiles that a rank holds at a time. Fewer than "flat" takes: smaller tiles. More: the rest keeps
             exp(S), and the backward pass need not compute it again: 3 units for what is kept
    "auto"   "flat", unless all of exp(S) fits into one more tile: then it is kept, as it is

For half precision, a tile's rows of X and of Y in float32 come on top of each.

exp(S) is kept as it is where the budget holds all of it (4 bytes per entry in float32, 8 in float64), and always in
float64. Otherwise float32 keeps bfloat16, 2 bytes per entry: then each off-diagonal weight P_ij + Q_ij in a kept tile
carries a relative error of at most 2^-9. The loss, and the weights of positive pairs, are not rounded. Where a row has
several positives, which then compete with each other, nothing is.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch

Memory = Literal["auto", "flat"] | int

_TILES = 2  # the logits, and a scratch tile
_SMALLEST_SIDE = 32  # below that, it is the tiles' number that takes the time
_MANY_TILES = 256**2


@dataclass(frozen=True)
class Budget:
    """What a sweep may allocate."""

    side: int  # rows and columns of a tile
    kept: int  # entries of exp(S) that are kept
    kept_dtype: torch.dtype


def default_side(device: torch.device) -> int:
    """Rows and columns of a tile: on a CPU, so that two tiles stay in its caches; elsewhere, so that they fill it."""
    return 640 if device.type == "cpu" else 4096


def smallest_budget(rows: int, cols: int, dtype: torch.dtype) -> int:
    """The bytes below which a sweep over rows x cols would not end: tiles of side 32, or 65536 tiles.

    >>> smallest_budget(4, 4, torch.float32), smallest_budget(8192, 8192, torch.float32)
    (8, 8192)
    """
    side = min(_SMALLEST_SIDE, isqrt(max(0, rows * cols - 1) // _MANY_TILES) + 1)
    return _TILES * side * side * dtype.itemsize


def fit(memory: Memory, *, entries: int, side: int, dtype: torch.dtype, exact: bool = False) -> Budget:
    """The budget of one rank.

    Args:
        memory: "auto", "flat", or bytes.
        entries: of S that this rank computes.
        side: of a tile, where memory does not say otherwise.
        dtype: the accumulation dtype.
        exact: nothing that is kept may be rounded.

    >>> fit(1000, entries=100, side=512, dtype=torch.float32)
    Budget(side=11, kept=0, kept_dtype=torch.float32)
    >>> fit(2**22, entries=2**20, side=512, dtype=torch.float32)
    Budget(side=512, kept=1048576, kept_dtype=torch.bfloat16)
    """
    if memory == "flat":
        return Budget(side, 0, dtype)
    if memory == "auto":
        return Budget(side, entries if entries <= side * side else 0, dtype)
    assert isinstance(memory, int)
    spare = memory - _TILES * side * side * dtype.itemsize
    if spare <= 0:
        return Budget(max(1, min(side, isqrt(memory // (_TILES * dtype.itemsize)))), 0, dtype)
    if exact or dtype == torch.float64 or spare >= entries * dtype.itemsize:
        return Budget(side, min(entries, spare // dtype.itemsize), dtype)
    return Budget(side, min(entries, spare // 2), torch.bfloat16)


class KeptTiles:
    """The first tiles of a sweep, one behind the other in one buffer, until the next does not fit."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._used = 0

    def keep(self, tile: torch.Tensor) -> None:
        """A copy of `tile`, if it fits."""
        room = self.next(tile.shape)
        if room is not None:
            room.copy_(tile)

    def next(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Where the next tile is kept, in the order in which they come; None if it is not."""
        start, self._used = self._used, self._used + shape[0] * shape[1]
        return self.buffer[start : self._used].view(shape) if self._used <= len(self.buffer) else None
