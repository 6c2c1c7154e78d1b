"""The launchers of the softmax kernels: from a tile to its sums, and from a tile to dS."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from .launch import Box, TileInputs, box_of, empty, layout, start, tiles

_SLOTS = ("sum", "target", "logits", "count")  # of sums
_WEIGHTS = ("sum", "target", "logits")
_BITS = {"sum": 1, "target": 2, "logits": 4}  # as in `tiles.softmax`


def tile_sums(
    tile: TileInputs, *, rows: Collection[str], cols: Collection[str]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sum up a tile of S, which is not stored.

    Args:
        tile: the tile of S.
        rows: the sums of each row: "sum", of the candidates' exponentials; "target", of the positives' logits;
            "logits" and "count", of the candidates' logits and their number. Either "sum" is among them, or there are
            none.
        cols: the sums of each column.

    Returns:
        The sums by name, (R,) and (C,), float64; a target only where there may be positives.
    """
    x, num_rows, num_cols = tile.x, tile.x.shape[0], tile.y.shape[0]
    names = [name for name in _SLOTS if name != "target" or tile.positive.named is not None or tile.positive.ids]
    sides = [[name for name in names if name in side] for side in (rows, cols)]
    plan = layout("tile_sums", tile, entries=len({*sides[0], *sides[1]} - {"sum"}))
    row_sums = empty(x, len(sides[0]), -(-num_cols // plan.blocks.cols), num_rows) if rows else None
    col_sums = empty(x, len(sides[1]), -(-num_rows // plan.blocks.rows), num_cols) if cols else None
    start(
        tiles("softmax").tile_sums, tile, plan, row_sums, col_sums, *_scaling(tile), CANDIDATES=tile.candidates,
        OF_ROWS=sum(_BITS.get(name, 0) for name in sides[0]), OF_COLS=sum(_BITS.get(name, 0) for name in sides[1]),
        PARTS=plan.blocks.parts,
    )  # fmt: skip
    sums: list[dict[str, Tensor]] = [
        {} if blocks is None else dict(zip(side, blocks.sum(1, dtype=torch.float64).unbind(), strict=True))
        for side, blocks in zip(sides, (row_sums, col_sums), strict=True)
    ]
    return sums[0], sums[1]


def tile_gradient(
    tile: TileInputs,
    out: Tensor,
    *,
    rows: Mapping[str, Tensor],
    cols: Mapping[str, Tensor],
    totals: bool = False,
) -> Tensor | None:
    """Write dS of a tile to `out`, (R, C), in its dtype; each row times its scale, if rows have scales.

    Args:
        tile: the tile of S.
        out: (R, C); each row contiguous.
        rows: weights, (R,), float32, contiguous, of each row's "sum", "target" and "logits", as in :func:`tile_sums`;
            may be empty.
        cols: weights, (C,), of each column's.
        totals: whether to compute sum_j dS_ij.

    Returns:
        sum_j dS_ij, (R,), float64, without the rows' scales; or None.
    """
    plan = layout("tile_gradient", tile, entries=len({*rows, *cols} - {"sum"}) + totals)
    summed = empty(tile.x, -(-tile.y.shape[0] // plan.blocks.cols), tile.x.shape[0]) if totals else None
    parts = plan.blocks.parts
    gradient = box_of(out, plan, parts)
    start(
        tiles("softmax").tile_gradient, tile, plan, gradient, summed,
        *(rows.get(name) for name in _WEIGHTS), *(cols.get(name) for name in _WEIGHTS), *_scaling(tile),
        last=(out.stride(0),), CANDIDATES=tile.candidates, STORES=type(gradient) is Box, PARTS=parts,
    )  # fmt: skip
    return None if summed is None else summed.sum(0, dtype=torch.float64)


def _scaling(tile: TileInputs) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return each row's scale and offset, and each column's scale."""
    terms = tile.row_terms
    return (None, None, None) if terms is None else (terms.scales, terms.offsets, tile.col_scales)
