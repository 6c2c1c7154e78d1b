"""The launchers of the softmax kernels: from a tile to its sums, and from a tile to dS."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .launch import LOG2_E, Entries, TileInputs, empty, or_unread, program_grid, rounded, start

_SLOTS = ("sum", "target", "logits", "count")  # of sums
_WEIGHTS = ("sum", "target", "logits")
_BITS = {"sum": 1, "target": 2, "logits": 4}  # as in `tiles.softmax`


def _fields(names: Collection[str]) -> int:
    return sum(bit for name, bit in _BITS.items() if name in names)


def tile_sums(
    tile: TileInputs, *, shift: float, rows: Collection[str], cols: Collection[str], keep: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sum up a tile of S, which is not stored.

    Args:
        tile: the tile of S.
        shift: of the exponentials, exp(S - shift).
        rows: the sums of each row: "sum", of the candidates' exponentials; "target", of the positives' logits;
            "logits" and "count", of the candidates' logits and their number. Either "sum" is among them, or there are
            none.
        cols: the sums of each column.
        keep: (R, C), contiguous, for the candidates' exponentials; None: they are not kept.

    Returns:
        The sums by name, (R,) and (C,), float64; a target only where there may be positives.
    """
    from .tiles import softmax

    logits = "logits" in {*rows, *cols}
    blocks, (down, across) = program_grid(
        tile,
        lean=not logits and keep is None,
        one_side="target" in {*rows, *cols} and not (rows and cols),
        more_per_entry=logits,
    )
    log2, of_logits, of_sums = rounded(tile.scale, shift)
    if tile.row_terms is not None:
        of_logits = 1 / LOG2_E
    has_positives = bool(tile.positive.comparisons)
    sides = [
        [name for name in _SLOTS if name in names and (has_positives or name != "target")] for names in (rows, cols)
    ]
    shapes = ((len(sides[0]), across, len(tile.x)), (len(sides[1]), down, len(tile.y)))
    made = [empty(tile.x, *shape) for shape in shapes]
    start(
        softmax.tile_sums, tile, blocks, (*made, *or_unread(tile, keep), *_scaling(tile, log2)), log2,
        CANDIDATES=tile.candidates, OF_ROWS=_fields(sides[0]), OF_COLS=_fields(sides[1]),
        BY_ROW=tile.row_terms is not None, BY_COL=tile.col_scales is not None, KEEP=keep is not None,
    )  # fmt: skip
    factors = {"sum": of_sums, "target": of_logits, "logits": of_logits, "count": 1.0}
    found = [
        {name: part.mul_(factors[name]) for name, part in zip(names, of_side.sum(1, dtype=torch.float64), strict=True)}
        for names, of_side in zip(sides, made, strict=True)
    ]
    return found[0], found[1]


def tile_gradient(
    tile: TileInputs,
    out: Tensor,
    *,
    shift: float,
    rows: Mapping[str, Tensor],
    cols: Mapping[str, Tensor],
    kept: Tensor | None = None,
    totals: bool = False,
) -> Tensor | None:
    """Write dS of a tile to `out`, (R, C), in its dtype; each row times its scale, if rows have scales.

    Args:
        tile: the tile of S.
        out: (R, C), contiguous.
        shift: of the exponentials.
        rows: weights, (R,), of each row's "sum", "target" and "logits", as in :func:`tile_sums`; may be empty.
        cols: weights, (C,), of each column's.
        kept: (R, C), exponentials that were kept; None: they are computed.
        totals: whether to compute sum_j dS_ij.

    Returns:
        sum_j dS_ij, (R,), float64, without the rows' scales; or None.
    """
    from .tiles import softmax

    if kept is not None and not {"logits"} & {*rows, *cols}:
        tile = replace(tile, excluded=Entries())  # kept exponentials are 0 there
    logits = "logits" in {*rows, *cols}
    blocks, (_, across) = program_grid(
        tile,
        lean=not logits and kept is None and not totals,
        more_per_entry=logits,
        no_product=kept is not None,
    )
    log2, _, left = rounded(tile.scale, shift)
    weights = []
    for side, count in ((rows, len(tile.x)), (cols, len(tile.y))):
        of_side = tile.x.new_empty(3 if side else 0, count, dtype=torch.float32)
        for slot, name in enumerate(_WEIGHTS):
            if name in side:
                torch.mul(side[name], left if name == "sum" else 1.0, out=of_side[slot])
        weights.append(of_side)
    summed = empty(tile.x, across * totals, len(tile.x))
    start(
        softmax.tile_gradient, tile, blocks,
        (out, summed, *weights, *or_unread(tile, kept), *_scaling(tile, log2)), log2,
        CANDIDATES=tile.candidates, OF_ROWS=_fields(rows), OF_COLS=_fields(cols),
        BY_ROW=tile.row_terms is not None, BY_COL=tile.col_scales is not None, KEPT=kept is not None, TOTALS=totals,
    )  # fmt: skip
    return summed.sum(0, dtype=torch.float64) if totals else None


def _scaling(tile: TileInputs, log2: tuple[float, float]) -> list[Tensor]:
    """Return each row's scale, its shift in units of log(2), and each column's scale."""
    terms = tile.row_terms
    if terms is None:
        return or_unread(tile, None, None, None)
    shifts = torch.full_like(terms.scales, log2[1])
    if terms.offsets is not None:
        shifts.sub_(terms.offsets, alpha=LOG2_E)
    return [terms.scales, shifts, *or_unread(tile, tile.col_scales)]
