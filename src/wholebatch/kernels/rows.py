"""The launchers of the kernels that make one pass over rows: numbers of the entry, weights of sides, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from .._base.normalize import EPS
from . import launch
from .launch import ONE_PASS, empty, laid_out, tiles

_ROWS, _FEATURES, _ENTRIES, _PAIRS = 16, 64, 1024, 512  # of a block
READABLE = (torch.float32, torch.bfloat16, torch.float16)  # dtypes of rows


@dataclass(eq=False)
class RowNumbers:
    """The numbers of the rows of two matrices."""

    blocks: Tensor  # (blocks, 3 + scalars), float64: the extremes of each block of rows
    products: Tensor  # (min(n, m),), float32, x_i . y_i
    norms: Tensor  # (n + m,), float32, those of x and then those of y

    @property
    def extremes(self) -> Tensor:
        """The largest norms of x and of y, the largest -x_i . y_i, and the scalars: (3 + scalars,), float64."""
        return self.blocks.amax(0)


def row_numbers(x: Tensor, y: Tensor, scalars: Sequence[Tensor]) -> RowNumbers:
    """Return the numbers of the rows of x, (n, d), and y, (m, d), in one pass; up to two scalars join the extremes."""
    x, y = laid_out(x.detach()), laid_out(y.detach())
    (n, d), m = x.shape, y.shape[0]
    aligned = gcd(16, d)
    pairs, blocks = (n, -(-m // _ROWS) or 1) if n < m else (m, -(-n // _ROWS) or 1)
    out = empty(x, blocks, 3 + len(scalars), dtype=torch.float64)
    numbers = empty(x, pairs + n + m)
    products, norms = numbers[:pairs], numbers[pairs:]
    scale, bias = (*scalars, None, None)[:2]
    launch.run(
        tiles("rows").row_numbers, blocks, x, y, scale, bias, products,
        norms, norms[n:], out, n, m, d // aligned, x.stride(0) // aligned, y.stride(0) // aligned,
        SCALARS=len(scalars), ALIGNED=aligned, BM=_ROWS, BK=_FEATURES, **ONE_PASS,
    )  # fmt: skip
    return RowNumbers(out, products, norms)


def side_weights(
    rows: tuple[Tensor, Tensor] | None, cols: tuple[Tensor, Tensor] | None, size: float
) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return N a_i / R_i of rows and of columns, float32, and the largest N |a_i| of some of each side, (2, blocks).

    A side is a_i and R_i, (n,), float64; None: there is no such side.
    """
    first = rows or cols
    assert first is not None
    (row_grads, row_sums), (col_grads, col_sums) = rows or first, cols or first
    n, m = row_grads.shape[0] if rows else 0, col_grads.shape[0] if cols else 0
    blocks = -(-n // _ENTRIES) + -(-m // _ENTRIES) or 1
    row_weights, col_weights = empty(row_grads, n), empty(col_grads, m)
    largest = empty(row_grads, 2, blocks, dtype=torch.float64)
    launch.run(
        tiles("rows").side_weights, blocks, row_grads, row_sums, col_grads, col_sums, row_weights, col_weights, largest,
        n, m, row_grads.stride(0), col_grads.stride(0), float(size), BLOCK=_ENTRIES, **ONE_PASS,
    )  # fmt: skip
    return row_weights if rows else None, col_weights if cols else None, largest


def pair_losses(row_sums: Tensor, col_sums: Tensor | None, products: Tensor, numbers: Tensor) -> Tensor:
    """Return the cross-entropy of each pair in its row, or the mean of those in its row and column, (n,), float64.

    Args:
        row_sums: R_i over the negatives of the row, (n,), float64.
        col_sums: likewise of the column; None: rows alone count.
        products: x_i . y_i, (n,), float32.
        numbers: scale and shift, as tiles have them; see `launch.numbers_of`.
    """
    n = products.shape[0]
    losses = empty(products, n, dtype=torch.float64)
    launch.run(
        tiles("rows").pair_losses, -(-n // _PAIRS) or 1, row_sums, col_sums, products, numbers, losses,
        n, BOTH=col_sums is not None, BLOCK=_PAIRS, **ONE_PASS,
    )  # fmt: skip
    return losses


def pair_weights(
    grads: Tensor, row_sums: Tensor, col_sums: Tensor | None, products: Tensor, numbers: Tensor, size: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return the derivatives of `pair_losses` times N: weights of E by rows and by columns, and of the pairs' logits.

    Args:
        grads: by the losses, (n,), float64.
        row_sums: as there, as are the next three.
        col_sums: or None.
        products: of the pairs.
        numbers: scale and shift.
        size: N.

    Returns:
        (n,), float32, likewise or None, (n,), float64, and the largest N |dS| of some of each side, (2, blocks).
    """
    n, sides = products.shape[0], 1 if col_sums is None else 2
    blocks = -(-n // _PAIRS) or 1
    row_weights, col_weights = empty(products, n), None if col_sums is None else empty(products, n)
    terms, largest = empty(products, n, dtype=torch.float64), empty(products, 2, blocks, dtype=torch.float64)
    launch.run(
        tiles("rows").pair_weights, blocks, grads, row_sums, col_sums, products, numbers, row_weights, col_weights,
        terms, largest, n, grads.stride(0), size / sides, BOTH=col_sums is not None, BLOCK=_PAIRS, **ONE_PASS,
    )  # fmt: skip
    return row_weights, col_weights, terms, largest


def row_gradient(
    products: Tensor,
    x: Tensor,
    pairs: tuple[Tensor, Tensor, float] | None,
    norms: Tensor | None,
    unit: Tensor | None,
    factor: float | Tensor,
    dtype: torch.dtype,
    *,
    index: Tensor | None = None,
    divided: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return f (u U_i + t_i y_i), less its part along x_i where rows are normalized, and all <x_i, u U_i + t_i y_i>.

    Args:
        products: U, (n, d), float32, contiguous.
        x: (n, d).
        pairs: y and t of the first rows, (k, d) and (k,), and a factor of t; None: there are no pairs.
        norms: (n,) or (n, 1), |x_i|, by which rows are divided. None: they are not.
        unit: u, shape (), float32; None: 1.
        factor: f; a tensor of shape () on the device of the rows is read there.
        dtype: of the result.
        index: (n,), int64, the rows of x that are meant; None: all.
        divided: whether U and t are divided by the norms already.
        in_place: whether the result may be written into U's memory, where it has that dtype.

    Returns:
        (n, d), and sums of the second over some rows each, float64.
    """
    products, x, (n, d) = products.contiguous(), laid_out(x), products.shape
    other, terms, term_factor = (None, None, 1.0) if pairs is None else pairs
    aligned, factor = gcd(16, d), factor.float() if isinstance(factor, Tensor) else factor
    blocks = -(-n // _ROWS) or 1
    out = products if in_place and dtype == products.dtype else empty(products, n, d, dtype=dtype)
    shares = empty(products, blocks, dtype=torch.float64)
    if other is not None:
        other = laid_out(other)
    launch.run(
        tiles("rows").row_gradient, blocks, products, x, index, other, terms, norms, unit, out, shares,
        n, 0 if terms is None else terms.shape[0], d // aligned, x.stride(0) // aligned,
        0 if other is None else other.stride(0) // aligned, 0 if terms is None else terms.stride(0),
        factor, float(term_factor),
        PAIRED=other is not None, NORMED=norms is not None, DIVIDED=divided, UNIT=unit is not None,
        LOADED=isinstance(factor, Tensor), EPS=EPS,
        ALIGNED=aligned, BM=_ROWS, BK=_FEATURES, **ONE_PASS,
    )  # fmt: skip
    return out, shares
