"""Inner products of rows with the same rows of another matrix, without a widened copy of either."""

from __future__ import annotations

import torch
from torch import Tensor

from .part_sizes import part_size
from .precision import accumulation_dtype, rows_at_a_time, wide_dtype


def inner(a: Tensor, b: Tensor | None, divided_by: Tensor | None = None) -> Tensor:
    """Return <a, b>, shape (), with the rows of a divided by `divided_by`, (rows, 1), if given.

    The sum is in float64, because the gradient of a learnable scale is a small difference of large numbers. A few rows
    at a time are widened.
    """
    assert b is not None, "a learnable scale always comes with U or V; please report this"
    total = torch.zeros((), dtype=wide_dtype(b.device), device=b.device)
    rows = rows_widened(b.shape[1], b.device)
    for start in range(0, len(b), rows):
        some = slice(start, start + rows)
        products = torch.linalg.vecdot(a[some].to(total.dtype), b[some].to(total.dtype))
        total += (products if divided_by is None else products / divided_by[some, 0]).sum(dtype=total.dtype)
    return total


def rows_widened(width: int, device: torch.device) -> int:
    """Return how many rows are widened at a time, by `inner` and where angles are computed.

    Each takes memory three to five times, in float64; a few short rows at a time would take time to start.
    """
    return max(rows_at_a_time(device) // 8, part_size("numbers", 2**16) // max(width, 1))


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """Return x_i . y_i of each row in the accumulation dtype, (rows,), without a gradient, a few rows at a time."""
    x, y, dtype, most = x.detach(), y.detach(), accumulation_dtype(x.dtype), rows_at_a_time(x.device)
    if x.shape[0] <= most:
        return torch.linalg.vecdot(x.to(dtype), y.to(dtype))
    parts = zip(x.split(most), y.split(most), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(dtype), b.to(dtype)) for a, b in parts])
