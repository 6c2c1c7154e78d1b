"""The options that all losses share, and the sweep that follows from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._base.settings import shown
from . import checks
from .axis import Axis
from .exchange import EXCHANGES, ExchangeName, select_exchange
from .reduction import Reduction
from .sweep import Memory, Sweep


@dataclass(frozen=True)
class Options:
    """A loss's options, known while it is traced.

    Args:
        reduction: "mean", "sum" or "none".
        exchange: "gather", "ring", or "auto": "gather" while it takes at most 1 GiB.
        tile: rows and columns of a tile of S, at most.
        memory: "auto", "flat", or bytes of products that are kept between the passes.
    """

    reduction: Reduction
    exchange: ExchangeName
    tile: int
    memory: Memory = "auto"

    def __post_init__(self) -> None:
        checks.choice("reduction", self.reduction, ("mean", "sum", "none"))
        checks.choice("exchange", self.exchange, EXCHANGES)
        if not checks.is_integer(self.tile) or not 1 <= self.tile < 2**31:
            raise ValueError(f"tile must be an integer >= 1, got {shown(self.tile)}")
        memory: Any = self.memory
        named = isinstance(memory, str) and memory in ("auto", "flat")
        if not named and (not checks.is_integer(memory) or not 0 <= memory < 2**63):
            raise ValueError(f"memory must be 'auto', 'flat' or a number of bytes >= 0, got {shown(memory)}")

    def sweep(self, axis: Axis, travels: Any, *, symmetric: bool = False) -> Sweep:
        """Return the sweep over all tiles, with the same exchange forward and backward; `travels` has b rows."""
        exchange = select_exchange(self.exchange, axis, travels)
        return Sweep(axis, exchange, self.tile, symmetric=symmetric, memory=self.memory)
