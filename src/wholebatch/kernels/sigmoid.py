"""The sigmoid kernel as a function of tensors: a tile to losses, and to dS."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import TileOf, or_nothing, parts, rounded, start


def tile_sigmoid(
    tile: TileOf, out: Tensor | None, *, bias: float, weights: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of a tile's rows, where each entry is a classification of its own; dS is written to `out`, if given.

    Args:
        tile: of S, without its bias.
        out: (R, C), contiguous.
        bias: added to S.
        weights: (R,), of rows, in dS; None: 1.
        totals: whether sum_j dS_ij is wanted.

    Returns:
        sum_j l_ij, and sum_j dS_ij or None; (R,), float64.
    """
    from . import sigmoid_tiles

    blocks, (_, across) = parts(tile)
    losses, summed = (tile.x.new_empty(across * wanted, len(tile.x), dtype=torch.float32) for wanted in (1, totals))
    given = [*or_nothing(tile, out), *or_nothing(tile, None if weights is None else weights.float().contiguous())]
    start(
        sigmoid_tiles.tile_sigmoid, tile, blocks, (losses, summed, *given), rounded(tile.scale, bias)[0],
        WEIGHTED=weights is not None, GRADIENT=out is not None, TOTALS=totals,
    )  # fmt: skip
    return losses.sum(0, dtype=torch.float64), summed.sum(0, dtype=torch.float64) if totals else None
