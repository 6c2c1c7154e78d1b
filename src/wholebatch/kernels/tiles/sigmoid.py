"""The kernel of the sigmoid sweep: losses of a tile's rows and dS, from similarities that are never stored.

    m_ij = -z_ij S_ij,  l_ij = log(1 + exp(m_ij)),  dS_ij = -z_ij w_i sigmoid(m_ij)        z_ij = 1: positive, else -1

Most pairs are clearly negative: their l_ij are small, and there are B^2 of them, so their relative error matters. With
e = exp(-|m|), which is at most 1,

    log(1 + exp(m)) = max(m, 0) + log(1 + e),        log2(1 + e) = e P(e)

P has degree 8 and the smallest possible relative error on [0, 1], 3.1e-8, or 1.9e-7 in float32; both sigmoids are
multiples of 1 / (1 + e), one approximate reciprocal (2^-23).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ANY, NEGATIVES, choose, columns_of, place_of, similarities, write

_LOG_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def log2_of_1_plus(e):
    """Return log2(1 + e) for e from 0 to 1."""
    series = e * 0.0075491818 - 0.0425670595
    series = series * e + 0.112856187
    series = series * e - 0.197118962
    series = series * e + 0.275641407
    series = series * e - 0.358408471
    series = series * e + 0.480692957
    series = series * e - 0.721340208
    return e * (series * e + 1.442695)


@triton.jit
def _reciprocal(x, APPROXIMATE: tl.constexpr):
    """Return 1 / x; the interpreter runs no assembly."""
    if APPROXIMATE:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        inverse = 1.0 / x
    return inverse


@triton.jit(do_not_specialize=[*ANY, "stride_sums", "added"])
def tile_sigmoid(
    x, y, numbers, losses, totals, gradient, row_weights,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y, stride_gradient, stride_sums, added,
    KINDS: tl.constexpr, CANDIDATES: tl.constexpr, APPROXIMATE: tl.constexpr, STORES: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write sum_j l_ij and sum_j dS_ij, (blocks of columns, rows), of `added` rows added, and dS, (rows, columns)."""
    sets = (
        positive, positive_stride, positive_rows, positive_cols,
        excluded, excluded_stride, excluded_rows, excluded_cols, first_row, num_rows, num_cols,
    )  # fmt: skip
    log2_scale, log2_bias = tl.load(numbers), tl.load(numbers + 1)
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    for block in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=BOXES):
        block_row, block_col = place_of(block, down, across, GROUP)
        row, col = block_row * BM, block_col * BN
        products = similarities(
            x, y, row, col, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN
        )
        rows = row + tl.arange(0, BM)
        here_rows = rows < num_rows
        row_losses, summed = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
        for part in tl.static_range(PARTS):
            first = col + part * (BN // PARTS)
            cols = first + tl.arange(0, BN // PARTS)
            here_cols = cols < num_cols
            # In units of log(2); beyond the last column, a bias of -inf leaves neither a loss nor a gradient.
            m = columns_of(products, part, PARTS) * log2_scale + tl.where(here_cols, log2_bias, float("-inf"))[None, :]
            positive_logits = float("-inf") if CANDIDATES == NEGATIVES else -m
            m = choose(m, positive_logits, float("-inf"), rows, cols, sets, KINDS)
            e = tl.exp2(-tl.abs(m))
            row_losses += tl.sum(tl.maximum(m, 0.0) + log2_of_1_plus(e), 1)
            if gradient is not None or totals is not None:
                inverse = _reciprocal(1.0 + e, APPROXIMATE)
                grad = tl.where(m > 0, inverse, e * inverse)
                if CANDIDATES != NEGATIVES:
                    grad = choose(grad, -grad, grad, rows, cols, sets, KINDS)
                if row_weights is not None:
                    grad *= tl.load(row_weights + rows, mask=here_rows, other=0.0)[:, None]
                if totals is not None:
                    summed += tl.sum(grad, 1)
                if gradient is not None:
                    write(gradient, row, first, rows, cols, here_rows, here_cols, stride_gradient, grad, STORES)
        offsets = block_col.to(tl.int64) * stride_sums + rows
        earlier = rows < added
        row_losses = row_losses * _LOG_2 + tl.load(losses + offsets, mask=earlier, other=0.0)
        tl.store(losses + offsets, row_losses, mask=here_rows)
        if totals is not None:
            tl.store(totals + offsets, summed + tl.load(totals + offsets, mask=earlier, other=0.0), mask=here_rows)
