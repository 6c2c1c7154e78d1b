"""The launchers of the nested kernels: from a tile to the sums of each part, and to the factors of its features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .._base.precision import vector
from .launch import TileInputs, empty, layout, start


@dataclass(frozen=True)
class Ends:
    """The ends of the parts of the features."""

    stops: Tensor  # m_l / unit, (L,), int32
    unit: int  # a power of two that divides all m_l; 8 or more is fast, and 64 faster

    @classmethod
    def of(cls, dims: Sequence[int], device: torch.device) -> Ends:
        """Return the ends of parts of these lengths."""
        unit = gcd(64, *dims)
        return cls(vector([m // unit for m in dims], torch.int32, device), unit)


@dataclass(frozen=True)
class NestedTile:
    """A tile of all S^l at once."""

    features: TileInputs  # the tile of whole features; its scale is in `row_scales`
    ends: Ends  # the ends of the parts
    row_scales: Tensor  # r^l, (L, R), float32, contiguous
    col_scales: Tensor  # q^l, (L, C), float32, contiguous


@dataclass(frozen=True)
class NestedWeights:
    """The weights of a tile's entries in dS^l, float32, contiguous."""

    rows: Tensor  # weights of each row's exponentials, (L, R)
    targets: Tensor  # weights of each row's positives, (L, R)
    cols: Tensor | None  # weights of each column's exponentials, (L, C); None: 0


def nested_sums(tile: NestedTile, *, cols: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sum up a tile of each S^l.

    Returns:
        sum_j E^l_ij over the negatives, (L, R); S^l of positives, (L, R); sum_i E^l_ij, (L, C), or None; all float64.
    """
    from .tiles import nested

    features, ends = tile.features, tile.ends
    plan, x, parts = layout("nested_sums", features, unit=ends.unit), features.x, len(ends.stops)
    across, down = -(-len(features.y) // plan.blocks.cols), -(-len(x) // plan.blocks.rows)
    rows, targets = (empty(x, parts, across, len(x)) for _ in range(2))
    col_sums = empty(x, parts, down, len(features.y)) if cols else None
    start(
        nested.nested_sums, features, plan, ends.stops, rows, targets, col_sums, tile.row_scales, tile.col_scales,
        units=parts, ENDS=ends.unit,
    )  # fmt: skip
    return _added(rows), _added(targets), None if col_sums is None else _added(col_sums)


def nested_gradient(
    tile: NestedTile, out: Tensor, weights: NestedWeights, *, totals_of_cols: bool
) -> tuple[Tensor, Tensor | None]:
    """Write H^l of a tile to `out`, (L, R, C), in its dtype.

    Args:
        tile: the tile.
        out: (L, R, C); each part one after the other, and each row contiguous.
        weights: the weights of its entries.
        totals_of_cols: whether to compute sum_i dS^l_ij S^l_ij.

    Returns:
        sum_j dS^l_ij S^l_ij, (L, R), and that of columns, (L, C), or None; float64.
    """
    from .tiles import nested

    features, ends = tile.features, tile.ends
    plan, x, parts = layout("nested_gradient", features, unit=ends.unit), features.x, len(ends.stops)
    across, down = -(-len(features.y) // plan.blocks.cols), -(-len(x) // plan.blocks.rows)
    row_sums = empty(x, parts, across, len(x))
    col_sums = empty(x, parts, down, len(features.y)) if totals_of_cols else None
    start(
        nested.nested_gradient, features, plan, out, ends.stops, row_sums, col_sums, tile.row_scales, tile.col_scales,
        weights.rows, weights.targets, weights.cols, units=parts, last=(out.stride(1),), ENDS=ends.unit,
    )  # fmt: skip
    return _added(row_sums), None if col_sums is None else _added(col_sums)


def _added(parts: Tensor) -> Tensor:
    """Return the sums of all blocks."""
    return parts.sum(1, dtype=torch.float64)
