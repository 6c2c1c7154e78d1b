"""Which entries of the similarity matrix are positive pairs, and which do not count: all that a sweep asks of a loss.

A sweep asks two questions about a tile. The answer is an index of entries, with which `matrix[index]` reads and writes
them, or None where there are none:

    positives(tile)    the entries that are targets
    excluded(tile)     the entries that are no candidates: their exponential is 0, and so is their gradient

Here both are diagonals: row k of one tower belongs to row k of the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..partition import Diagonal, Tile

Index = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Pairs:
    """Positive and excluded entries, in rows of this rank and columns of the global batch."""

    positive: tuple[Diagonal, ...]
    excluding: tuple[Diagonal, ...] = ()

    def positives(self, tile: Tile, device: torch.device) -> Index | None:
        """The entries of the tile that are targets."""
        return _index(self.positive, tile, device)

    def excluded(self, tile: Tile, device: torch.device) -> Index | None:
        """The entries of the tile that are no candidates."""
        return _index(self.excluding, tile, device)


def _index(diagonals: Sequence[Diagonal], tile: Tile, device: torch.device) -> Index | None:
    parts = [diagonal.within(tile) for diagonal in diagonals]
    parts = [part for part in parts if part[2]]
    if not parts:
        return None
    rows = torch.cat([torch.arange(row, row + length, device=device) for row, _, length in parts])
    cols = torch.cat([torch.arange(col, col + length, device=device) for _, col, length in parts])
    return rows, cols
