"""The nested kernels as functions of tensors: a tile to sums of each part, and to what features are multiplied with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .._precision import vector
from .launch import TileOf, parts, rounded, start


@dataclass(frozen=True)
class Ends:
    """Where parts of the features end.

    Args:
        at: m_l / unit, (L,), int32.
        unit: a power of two that divides all m_l; 8 or more is fast.
    """

    at: Tensor
    unit: int

    @classmethod
    def of(cls, dims: Sequence[int], device: torch.device) -> Ends:
        """Those of parts of these lengths."""
        unit = gcd(16, *dims)
        return cls(vector([m // unit for m in dims], torch.int32, device), unit)


def nested_sums(
    tile: TileOf, ends: Ends, row_scales: Tensor, col_scales: Tensor, *, shift: float, cols: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sums of a tile of each S^l.

    Args:
        tile: of the features, whole; its scale is in `row_scales`.
        ends: of the parts.
        row_scales: r^l, (L, R), float32, contiguous.
        col_scales: q^l, (L, C).
        shift: of the exponentials, exp(S - shift).
        cols: whether columns are summed, too.

    Returns:
        sum_j E^l_ij over the negatives, (L, R); S^l of positives, (L, R); sum_i E^l_ij, (L, C), or None; all float64.
    """
    from . import nested_tiles

    blocks, (down, across) = parts(tile, many=True, odd=ends.unit < 8)
    (_, log2_shift), _, of_sums = rounded(1.0, shift)
    many = len(ends.at)
    rows, targets = (tile.x.new_empty(many, across, len(tile.x), dtype=torch.float32) for _ in range(2))
    of_cols = tile.x.new_empty(many, down * cols, len(tile.y), dtype=torch.float32)
    start(
        nested_tiles.nested_sums, tile, blocks, (ends.at, rows, targets, of_cols, row_scales, col_scales),
        (log2_shift,), depth=many, OF_COLS=cols, ENDS=ends.unit,
    )  # fmt: skip
    found = [of.sum(1, dtype=torch.float64) for of in (rows, targets, of_cols)]
    return found[0].mul_(of_sums), found[1], found[2].mul_(of_sums) if cols else None


def nested_gradient(
    tile: TileOf,
    out: Tensor,
    ends: Ends,
    row_scales: Tensor,
    col_scales: Tensor,
    *,
    shift: float,
    rows: Tensor,
    targets: Tensor,
    cols: Tensor | None,
    totals_of_cols: bool,
) -> tuple[Tensor, Tensor | None]:
    """Write H^l of a tile to `out`, (L, R, C), in its dtype.

    Args:
        tile: of the features, whole.
        out: (L, R, C), contiguous.
        ends: as in :func:`nested_sums`.
        row_scales: as there.
        col_scales: as there.
        shift: as there.
        rows: weights of a row's exponentials, (L, R), float32, contiguous.
        targets: of its positives.
        cols: weights of a column's exponentials, (L, C); None: 0.
        totals_of_cols: whether sum_i dS^l_ij S^l_ij is wanted.

    Returns:
        sum_j dS^l_ij S^l_ij, (L, R), and of columns (L, C) or None; float64.
    """
    from . import nested_tiles

    blocks, (down, across) = parts(tile, many=True, twice=True, odd=ends.unit < 8)
    (_, log2_shift), _, left = rounded(1.0, shift)
    rows, cols = rows * left, None if cols is None else cols * left
    many = len(ends.at)
    of_rows = tile.x.new_empty(many, across, len(tile.x), dtype=torch.float32)
    of_cols = tile.x.new_empty(many, down * totals_of_cols, len(tile.y), dtype=torch.float32)
    start(
        nested_tiles.nested_gradient, tile, blocks,
        (out, ends.at, of_rows, of_cols, row_scales, col_scales, rows, targets, rows if cols is None else cols),
        (log2_shift,), depth=many, OF_COLS=cols is not None, TOTALS_OF_COLS=totals_of_cols,
        ENDS=ends.unit,
    )  # fmt: skip
    return of_rows.sum(1, dtype=torch.float64), of_cols.sum(1, dtype=torch.float64) if totals_of_cols else None
