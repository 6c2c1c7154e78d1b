"""What all losses let their caller choose, and the sweep that follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax

from .._settings import shown
from . import checks
from .axis import Axis
from .exchange import Exchange, Memory, Sweep
from .reduction import Reduction

ExchangeName = Literal["auto", "gather", "ring"]
_GATHER_BYTES = 2**30  # Y of all devices, its gradient, and the sum of that


@dataclass(frozen=True)
class Options:
    """Of a loss; known while it is traced.

    Args:
        reduction: "mean", "sum" or "none".
        exchange: "gather", "ring", or "auto": a gather, up to 1 GiB.
        tile: rows and columns of a tile of S, at most.
        memory: bytes of products that are kept between the passes, or "flat".
    """

    reduction: Reduction
    exchange: ExchangeName
    tile: int
    memory: Memory = "flat"

    def __post_init__(self) -> None:
        checks.choice("reduction", self.reduction, ("mean", "sum", "none"))
        checks.choice("exchange", self.exchange, ("auto", "gather", "ring"))
        if not checks.is_integer(self.tile) or not 1 <= self.tile < 2**31:
            raise ValueError(f"tile must be an integer >= 1, got {shown(self.tile)}")
        flat = isinstance(self.memory, str) and self.memory == "flat"
        if not flat and (not checks.is_integer(self.memory) or not 0 <= self.memory < 2**63):  # type: ignore[operator]
            raise ValueError(f"memory must be 'flat' or a number of bytes >= 0, got {shown(self.memory)}")

    def sweep(self, axis: Axis, travels: Any, *, symmetric: bool = False) -> Sweep:
        """Over all tiles, with the same exchange forward and backward, given what travels: a tree with b rows."""
        exchange: Exchange = "ring"
        if self.exchange != "auto":
            exchange = self.exchange
        elif 3 * axis.size * sum(leaf.nbytes for leaf in jax.tree.leaves(travels)) <= _GATHER_BYTES:
            exchange = "gather"
        return Sweep(axis, exchange, self.tile, symmetric=symmetric, memory=self.memory)
