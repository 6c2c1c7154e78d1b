"""The launcher of the sigmoid kernel: from a tile to its losses and dS."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Box, TileInputs, box_of, empty, interpreted, layout, start


def tile_sigmoid(
    tile: TileInputs, out: Tensor | None, *, weights: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor | None]:
    """Sum the losses of a tile's rows, where each entry is a classification of its own; write dS to `out`, if given.

    Args:
        tile: the tile of S, whose second number is its bias.
        out: (R, C); each row contiguous, or None.
        weights: (R,), float32, contiguous, weights of rows in dS; None: 1.
        totals: whether to compute sum_j dS_ij.

    Returns:
        sum_j l_ij, and sum_j dS_ij or None; (R,), float64.
    """
    from .tiles import sigmoid

    of = layout("tile_sigmoid", tile, entries=totals + (weights is not None))
    across, parts = -(-len(tile.y) // of.blocks.cols), of.blocks.parts
    sums = empty(tile.x, 1 + totals, across, len(tile.x))
    gradient = None if out is None else box_of(out, of, parts)
    start(
        sigmoid.tile_sigmoid, tile, of, sums, sums[1] if totals else None, gradient, weights,
        last=(0 if out is None else out.stride(0),),
        CANDIDATES=tile.candidates, APPROXIMATE=not interpreted(), STORES=type(gradient) is Box, PARTS=parts,
    )  # fmt: skip
    losses, *summed = sums.sum(1, dtype=torch.float64).unbind()
    return losses, summed[0] if summed else None
