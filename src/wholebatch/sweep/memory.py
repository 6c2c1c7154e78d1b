"""Compute from `memory=` the size of a tile, and the number of entries of exp(S) that are kept for the backward pass.

    "flat"   two tiles, whatever the batch, and one of dS where products round it to half precision. S is computed
             twice: 4 units of b B d multiply-adds for a loss that uses rows and columns
    bytes    the memory of all tiles that a rank holds at a time. If it is less than "flat" needs, tiles are smaller. If
             it is more, the rest holds exp(S), which the backward pass does not compute again: 3 units for kept entries
    "auto"   "flat", unless all of exp(S) fits into one more tile: then it is kept without rounding

Where half precision is widened, each tile also needs its rows of X and of Y in float32.

exp(S) is kept without rounding where the budget holds all of it (4 bytes per entry in float32, 8 in float64), and
always in float64. Otherwise a float32 sweep keeps bfloat16, 2 bytes per entry: then each off-diagonal weight
P_ij + Q_ij in a kept tile has a relative error of at most 2^-8. The loss and the weights of positive pairs are not
rounded. If rows have several positives, which compete with each other, nothing is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch

from .._base.precision import part_size
from .products import Products

Memory = Literal["auto", "flat"] | int

_TILES = 2  # the logits, and a scratch tile
_SMALLEST_SIDE = 32  # with smaller tiles the time would go into starting them
_MANY_TILES = 256**2


@dataclass(frozen=True)
class Budget:
    """The memory that a sweep may allocate."""

    side: int  # rows and columns of a tile
    kept: int  # entries of exp(S) that are kept
    kept_dtype: torch.dtype


def default_side(device: torch.device) -> int:
    """Return rows and columns of a tile: on a CPU, two tiles fit into its caches; a GPU is kept busy by one tile."""
    return part_size("side", 640 if device.type == "cpu" else 4096)


def bytes_of_an_entry(dtype: torch.dtype, products: Products) -> int:
    """Return the bytes of all tiles for each entry of a tile.

    >>> bytes_of_an_entry(torch.float32, Products()), bytes_of_an_entry(torch.float32, Products("bfloat16"))
    (8, 10)
    """
    return _TILES * dtype.itemsize + products.bytes_of_gradients


def smallest_budget(rows: int, cols: int, bytes_of_entry: int) -> int:
    """Return the least bytes with which a sweep over rows x cols is not too slow: tiles of side 32, or 65536 tiles.

    >>> smallest_budget(4, 4, 8), smallest_budget(8192, 8192, 8)
    (8, 8192)
    """
    side = min(_SMALLEST_SIDE, isqrt(max(0, rows * cols - 1) // _MANY_TILES) + 1)
    return side * side * bytes_of_entry


def fit(
    memory: Memory, *, entries: int, side: int, dtype: torch.dtype, bytes_of_entry: int = 0, exact: bool = False
) -> Budget:
    """Return the budget of one rank.

    Args:
        memory: "auto", "flat", or bytes.
        entries: number of entries of S that this rank computes.
        side: of a tile, unless memory asks for smaller ones.
        dtype: the accumulation dtype.
        bytes_of_entry: from `bytes_of_an_entry`; 0: of float32 or float64 products.
        exact: whether kept entries must not be rounded.

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
    bytes_of_entry = bytes_of_entry or bytes_of_an_entry(dtype, Products())
    spare = memory - side * side * bytes_of_entry
    if spare <= 0:
        return Budget(max(1, min(side, isqrt(memory // bytes_of_entry))), 0, dtype)
    if exact or dtype == torch.float64 or spare >= entries * dtype.itemsize:
        return Budget(side, min(entries, spare // dtype.itemsize), dtype)
    return Budget(side, min(entries, spare // 2), torch.bfloat16)


class KeptTiles:
    """The first tiles of a sweep, one after the other in one buffer, as many as fit."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.buffer = buffer
        self._used = 0

    def keep(self, tile: torch.Tensor) -> None:
        """Keep a copy of `tile`, if it fits."""
        room = self.next(tile.shape)
        if room is not None:
            room.copy_(tile)

    def next(self, shape: tuple[int, ...]) -> torch.Tensor | None:
        """Return the memory of the next tile, in the order of the sweep; None if that tile is not kept."""
        start, self._used = self._used, self._used + shape[0] * shape[1]
        return self.buffer[start : self._used].view(shape) if self._used <= len(self.buffer) else None
