"""The options that all losses share, and the sweep that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from .._base.settings import check_choice, shown
from . import checks
from .axis import Axis
from .exchange import EXCHANGES, ExchangeName, select_exchange
from .products import sum_dtype
from .reduction import Reduction
from .sweep import Sweep

Memory = Literal["auto", "flat"] | int

_AUTO_BYTES, _FLAT_TILE = 2**30, 1024


@dataclass(frozen=True)
class Options:
    """A loss's options, known while it is traced.

    Args:
        reduction: "mean", "sum" or "none".
        exchange: "gather", "ring", or "auto": "gather" while it takes at most 1 GiB.
        tile: rows and columns of a tile of S, at most; None: as many as `memory` allows.
        memory: bytes of products that are kept between the passes; "flat": none; "auto": 1 GiB.
    """

    reduction: Reduction
    exchange: ExchangeName
    tile: int | None
    memory: Memory = "auto"

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum", "none"))
        check_choice("exchange", self.exchange, EXCHANGES)
        tile: Any = self.tile
        if tile is not None and (not checks.is_integer(tile) or not 1 <= tile < 2**31):
            raise ValueError(f"tile must be an integer >= 1 or None, got {shown(tile)}")
        memory: Any = self.memory
        named = isinstance(memory, str) and memory in ("auto", "flat")
        if not named and (not checks.is_integer(memory) or not 0 <= memory < 2**63):
            raise ValueError(f"memory must be 'auto', 'flat' or a number of bytes >= 0, got {shown(memory)}")

    def sweep(self, axis: Axis, stays: Array, travels: Array, *, symmetric: bool = False) -> Sweep:
        """Return the sweep over all tiles, with the same exchange forward and backward.

        Tiles are a device's whole block of S, if all of its blocks fit into the memory; else a quarter of the memory.
        """
        exchange = select_exchange(self.exchange, axis, travels)
        memory = {"auto": _AUTO_BYTES, "flat": 0}[self.memory] if isinstance(self.memory, str) else self.memory
        rows, cols, entries = len(stays), len(travels), memory // jnp.dtype(sum_dtype(stays)).itemsize
        fits = rows * cols * axis.size <= entries
        tile = max(rows, cols, 1) if fits else max(isqrt(entries) // 2, _FLAT_TILE)
        return Sweep(axis, exchange, self.tile or tile, symmetric=symmetric, memory=memory)
