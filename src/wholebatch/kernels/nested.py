"""The launchers of the nested kernels: from a tile to the sums of each part, and to the factors of its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .._precision import vector
from .launch import TileInputs, empty, program_grid, rounded, start


@dataclass(frozen=True)
class Ends:
    """The ends of the parts of the features.

    Args:
        at: m_l / unit, (L,), int32.
        unit: a power of two that divides all m_l; 8 or more is fast.
    """

    at: Tensor
    unit: int

    @classmethod
    def of(cls, dims: Sequence[int], device: torch.device) -> Ends:
        """Return the ends of parts of these lengths."""
        unit = gcd(16, *dims)
        return cls(vector([m // unit for m in dims], torch.int32, device), unit)


@dataclass(frozen=True)
class NestedTile:
    """A tile of all S^l at once.

    Args:
        features: the tile of whole features; its scale is in `row_scales`.
        ends: the ends of the parts.
        row_scales: r^l, (L, R), float32, contiguous.
        col_scales: q^l, (L, C), float32, contiguous.
    """

    features: TileInputs
    ends: Ends
    row_scales: Tensor
    col_scales: Tensor


@dataclass(frozen=True)
class NestedWeights:
    """The weights of a tile's entries in dS^l, float32, contiguous.

    Args:
        rows: weights of each row's exponentials, (L, R).
        targets: weights of each row's positives, (L, R).
        cols: weights of each column's exponentials, (L, C); None: 0.
    """

    rows: Tensor
    targets: Tensor
    cols: Tensor | None


def nested_sums(tile: NestedTile, *, shift: float, cols: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum up a tile of each S^l.

    Args:
        tile: the tile.
        shift: of the exponentials, exp(S - shift).
        cols: whether columns are summed, too.

    Returns:
        sum_j E^l_ij over the negatives, (L, R); S^l of positives, (L, R); sum_i E^l_ij, (L, C), or None; all float64.
    """
    from .tiles import nested

    features, ends = tile.features, tile.ends
    blocks, (down, across) = program_grid(features, more_per_entry=True, parts=True, single_loads=ends.unit < 8)
    (_, log2_shift), _, of_sums = rounded(1.0, shift)
    x, parts = features.x, len(ends.at)
    rows, targets = (empty(x, parts, across, len(x)) for _ in range(2))
    of_cols = empty(x, parts, down * cols, len(features.y))
    start(
        nested.nested_sums, features, blocks, (ends.at, rows, targets, of_cols, tile.row_scales, tile.col_scales),
        (log2_shift,), depth=parts, OF_COLS=cols, ENDS=ends.unit,
    )  # fmt: skip
    found = [sums.sum(1, dtype=torch.float64) for sums in (rows, targets, of_cols)]
    return found[0].mul_(of_sums), found[1], found[2].mul_(of_sums) if cols else None


def nested_gradient(
    tile: NestedTile, out: Tensor, weights: NestedWeights, *, shift: float, totals_of_cols: bool
) -> tuple[Tensor, Tensor | None]:
    """Write H^l of a tile to `out`, (L, R, C), in its dtype.

    Args:
        tile: the tile.
        out: (L, R, C), contiguous.
        weights: the weights of its entries.
        shift: as in :func:`nested_sums`.
        totals_of_cols: whether to compute sum_i dS^l_ij S^l_ij.

    Returns:
        sum_j dS^l_ij S^l_ij, (L, R), and that of columns, (L, C), or None; float64.
    """
    from .tiles import nested

    features, ends = tile.features, tile.ends
    blocks, (down, across) = program_grid(
        features, more_per_entry=True, parts=True, two_totals=True, single_loads=ends.unit < 8
    )
    (_, log2_shift), _, remaining = rounded(1.0, shift)
    rows, cols = weights.rows * remaining, None if weights.cols is None else weights.cols * remaining
    x, parts = features.x, len(ends.at)
    of_rows = empty(x, parts, across, len(x))
    of_cols = empty(x, parts, down * totals_of_cols, len(features.y))
    start(
        nested.nested_gradient, features, blocks,
        (
            out, ends.at, of_rows, of_cols, tile.row_scales, tile.col_scales,
            rows, weights.targets, rows if cols is None else cols,
        ),
        (log2_shift,), depth=parts, OF_COLS=cols is not None, TOTALS_OF_COLS=totals_of_cols,
        ENDS=ends.unit,
    )  # fmt: skip
    return of_rows.sum(1, dtype=torch.float64), of_cols.sum(1, dtype=torch.float64) if totals_of_cols else None
