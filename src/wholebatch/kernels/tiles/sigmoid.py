"""The kernel of the sigmoid sweep: losses of a tile's rows and dS, from similarities that are never stored.

    m_ij = -z_ij S_ij,  l_ij = log(1 + exp(m_ij)),  dS_ij = -z_ij w_i sigmoid(m_ij)        z_ij = 1: positive, else -1

Most pairs are clearly negative: their l_ij are small, and there are B^2 of them, so their relative error matters. With
e = exp(-|m|) and t = e / (2 + e), which is at most 1/3,

    log(1 + e) = 2 artanh(t) = 2 (t + t^3 / 3 + t^5 / 5 + ...)

and after eight terms the remainder is less than t^17 / 8, below float32's resolution.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ANY, NO_IDS, members, place, similarities

_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit(do_not_specialize=ANY)
def tile_sigmoid(
    x, y, losses, totals, gradient, row_weights,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y, log2_scale, log2_bias,
    POSITIVE: tl.constexpr, POSITIVE_IDS: tl.constexpr, EXCLUDED: tl.constexpr, EXCLUDED_IDS: tl.constexpr,
    WEIGHTED: tl.constexpr, GRADIENT: tl.constexpr, TOTALS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write sum_j l_ij and sum_j dS_ij, (blocks of columns, rows), and dS, (rows, columns)."""
    _, block_col, rows, cols, here_rows, here_cols = place(num_rows, num_cols, BM, BN, GROUP)
    m = similarities(
        x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, ALIGNED, BK, PRECISION, WIDEN
    )
    m = m * log2_scale + log2_bias  # in units of log(2)
    if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
        among = members(
            rows, cols, num_rows, num_cols, first_row, positive, positive_stride, positive_rows, positive_cols,
            POSITIVE, POSITIVE_IDS,
        )  # fmt: skip
        m = tl.where(among, -m, m)
    if EXCLUDED > 0 or EXCLUDED_IDS != NO_IDS:
        out = members(
            rows, cols, num_rows, num_cols, first_row, excluded, excluded_stride, excluded_rows, excluded_cols,
            EXCLUDED, EXCLUDED_IDS,
        )  # fmt: skip
        m = tl.where(out, float("-inf"), m)
    m = tl.where(here_cols[None, :], m, float("-inf"))
    e = tl.exp2(-tl.abs(m))
    t = e / (2.0 + e)
    square = t * t
    series = 1.0 / 15
    for odd in tl.static_range(13, 0, -2):
        series = series * square + 1.0 / odd
    of_pairs = tl.maximum(m, 0.0) * _LOG_2 + 2.0 * t * series
    at = block_col.to(tl.int64) * num_rows + rows
    tl.store(losses + at, tl.sum(of_pairs, 1), mask=here_rows)
    if GRADIENT or TOTALS:
        made = tl.where(m > 0, 1.0, e) / (1.0 + e)
        if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
            made = tl.where(among, -made, made)
        if WEIGHTED:
            made *= tl.load(row_weights + rows, mask=here_rows, other=0.0)[:, None]
        if TOTALS:
            tl.store(totals + at, tl.sum(made, 1), mask=here_rows)
        if GRADIENT:
            to = rows[:, None] * num_cols + cols[None, :]  # a tile has fewer than 2^31 entries
            here = here_rows[:, None] & here_cols[None, :]
            tl.store(gradient + to, made.to(gradient.dtype.element_ty), mask=here)
