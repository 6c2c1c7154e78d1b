"""The launcher of the sigmoid kernel: from a tile to its losses and dS."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import TileInputs, empty, or_unread, program_grid, rounded, start


def tile_sigmoid(
    tile: TileInputs, out: Tensor | None, *, bias: float, weights: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the losses of a tile's rows, where each entry is a classification of its own; write dS to `out`, if given.

    Args:
        tile: the tile of S, without its bias.
        out: (R, C), contiguous, or None.
        bias: added to S.
        weights: (R,), weights of rows in dS; None: 1.
        totals: whether to compute sum_j dS_ij.

    Returns:
        sum_j l_ij, and sum_j dS_ij or None; (R,), float64.
    """
    from .tiles import sigmoid

    blocks, (_, across) = program_grid(tile)
    losses, summed = (empty(tile.x, across * count, len(tile.x)) for count in (1, totals))
    given = [*or_unread(tile, out), *or_unread(tile, None if weights is None else weights.float().contiguous())]
    start(
        sigmoid.tile_sigmoid, tile, blocks, (losses, summed, *given), rounded(tile.scale, bias)[0],
        WEIGHTED=weights is not None, GRADIENT=out is not None, TOTALS=totals,
    )  # fmt: skip
    return losses.sum(0, dtype=torch.float64), summed.sum(0, dtype=torch.float64) if totals else None
