"""The launcher of the sigmoid kernel: from a tile to its losses and dS."""

from __future__ import annotations

import torch
from torch import Tensor

from .launch import Box, Layout, TileInputs, box_of, empty, interpreted, layout, start


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
    sums = sigmoid_sums(tile.x.shape[0], tile, weighted=weights is not None, totals=totals)
    add_sigmoid(sums, tile, out, weights=weights, add=False)
    losses, *summed = sums.sum(1, dtype=torch.float64).unbind()
    return losses, summed[0] if summed else None


def sigmoid_sums(rows: int, tile: TileInputs, *, weighted: bool, totals: bool) -> Tensor:
    """Return memory for sums over blocks of columns: of losses, and with `totals` of dS, (1 or 2, blocks, rows).

    There are `rows` in all tiles; no tile is wider than this one.
    """
    plan = _layout(tile, weighted=weighted, totals=totals)
    return empty(tile.x, 1 + totals, -(-tile.y.shape[0] // plan.blocks.cols), rows)


def add_sigmoid(sums: Tensor, tile: TileInputs, out: Tensor | None, *, weights: Tensor | None, add: bool) -> None:
    """Write the sums of a tile's rows to `sums`, (1 or 2, blocks, R), or add them; and dS to `out`, if given.

    So tiles that follow each other in the columns of S leave the sums over all of them, in float32.
    """
    from .tiles import sigmoid

    totals = sums.shape[0] > 1
    plan = _layout(tile, weighted=weights is not None, totals=totals)
    grad = None if out is None else box_of(out, plan, plan.blocks.parts)
    start(
        sigmoid.tile_sigmoid, tile, plan, sums[0], sums[1] if totals else None, grad, weights,
        last=(0 if out is None else out.stride(0), sums.stride(1), tile.x.shape[0] if add else 0),
        CANDIDATES=tile.candidates, APPROXIMATE=not interpreted(), STORES=type(grad) is Box, PARTS=plan.blocks.parts,
    )  # fmt: skip


def _layout(tile: TileInputs, *, weighted: bool, totals: bool) -> Layout:
    return layout("tile_sigmoid", tile, entries=totals + weighted)
