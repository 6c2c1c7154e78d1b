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
from .products import sum_dtype
from .reduction import Reduction
from .sweep import Sweep

ExchangeName = Literal["auto", "gather", "ring"]
Memory = Literal["auto", "flat"] | int

_AUTO_BYTES, _FLAT_TILE = 2**30, 1024
_GATHER_BYTES = 2**30  # Y of all devices, its gradient, and the sum of that


@dataclass(frozen=True)
class Options:
    """A loss's options, known while it is traced, with the meanings in :func:`wholebatch.jax.clip_loss`."""

    reduction: Reduction
    exchange: ExchangeName
    tile: int | None
    memory: Memory = "auto"

    def __post_init__(self) -> None:
        check_choice("reduction", self.reduction, ("mean", "sum", "none"))
        check_choice("exchange", self.exchange, ("auto", "gather", "ring"))
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
        exchange: str = self.exchange
        if exchange == "auto":
            exchange = "gather" if 3 * axis.size * travels.nbytes <= _GATHER_BYTES else "ring"
        memory = {"auto": _AUTO_BYTES, "flat": 0}[self.memory] if isinstance(self.memory, str) else self.memory
        rows, cols, entries = len(stays), len(travels), memory // jnp.dtype(sum_dtype(stays)).itemsize
        fits = rows * cols * axis.size <= entries
        tile = max(rows, cols, 1) if fits else max(isqrt(entries) // 2, _FLAT_TILE)
        return Sweep(axis, exchange, self.tile or tile, symmetric=symmetric, memory=memory)
