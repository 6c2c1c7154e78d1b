"""The kernels of the softmax sweep: the similarities of a tile are computed and used on the chip, and never stored.

    tile_sums        S -> sum_j E_ij and sum_i E_ij of the candidates; sums of S_ij of positives, and of candidates
    tile_gradient    S -> dS_ij = E_ij (r_i + c_j) + m_i + m'_j of candidates, + t_i + t'_j of positives

with E_ij = exp(S_ij - shift) = 2^(x_i . y_j scale log2(e) - shift log2(e)): one product, one multiply-add and one `ex2`
for each entry. A program computes BM x BN entries. It writes one number for each of its rows and columns, to a separate
place, and these are added in a fixed order afterward: no atomics, no locks, the same bits each time.

The positives' terms of dS are added before dS is rounded to the features' dtype: after good training they cancel nearly
all of E_ij (r_i + c_j), and rounding before the addition would leave only bfloat16's errors.

E of the candidates may be kept, and read again instead of computing a product. Rows and columns may have a scale each,
such as 1 / |x_i| and 1 / |y_j| for X and Y that are not normalized, and rows a shift: the kernel then writes dS_ij
times these scales, for products with X and Y as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ANY, NO_IDS, any_named, members, place, similarities

# Which entries are candidates; a positive may be one even if it is excluded.
NEGATIVES = tl.constexpr(0)
ALL = tl.constexpr(1)
POSITIVES = tl.constexpr(2)

# The sums of a side, and its weights in dS, a bit each. A side without the first bit does not exist.
EXPONENTIALS = tl.constexpr(1)
TARGETS = tl.constexpr(2)
LOGITS = tl.constexpr(4)  # and their number


@triton.jit
def _as_long(x, beside):
    """Convert x to 64 bits, even if it is a constant, such as a single column; `beside` is any number."""
    return beside.to(tl.int64) * 0 + x


@triton.jit
def _write_sums(out, at, here, others, values, AXIS: tl.constexpr):
    """Write the sum of each row (AXIS 1) or column (0) over the others that exist."""
    tl.store(out + at, tl.sum(tl.where(tl.expand_dims(others, 1 - AXIS), values, 0.0), AXIS), mask=here)


@triton.jit(do_not_specialize=ANY)
def tile_sums(
    x, y, of_rows, of_cols, kept, row_scale, row_shift, col_scale,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y, log2_scale, log2_shift,
    POSITIVE: tl.constexpr, POSITIVE_IDS: tl.constexpr, EXCLUDED: tl.constexpr, EXCLUDED_IDS: tl.constexpr,
    CANDIDATES: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr,
    KEEP: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the sums of a tile, (fields, blocks of columns, rows) and (fields, blocks of rows, columns).

    The sums of logits are those of x . y, or of S / log(2) where each row has a scale.
    """
    block_row, block_col, rows, cols, here_rows, here_cols = place(num_rows, num_cols, BM, BN, GROUP)
    logits = similarities(
        x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, ALIGNED, BK, PRECISION, WIDEN
    )
    if BY_ROW:
        scales = tl.load(row_scale + rows, mask=here_rows, other=0.0) * log2_scale
        if BY_COL:
            logits *= tl.load(col_scale + cols, mask=here_cols, other=0.0)[None, :]
        exponents = logits * scales[:, None] - tl.load(row_shift + rows, mask=here_rows, other=0.0)[:, None]
        logits = exponents + log2_shift
    else:
        exponents = logits * log2_scale - log2_shift
    across, down = _as_long(tl.cdiv(num_cols, BN), block_col), _as_long(tl.cdiv(num_rows, BM), block_row)
    at_rows, stride_rows = block_col.to(tl.int64) * num_rows + rows, across * num_rows
    at_cols, stride_cols = block_row.to(tl.int64) * num_cols + cols, down * num_cols
    # Sums of logits come first: then their registers are free for exponentials.
    if EXCLUDED > 0 or EXCLUDED_IDS != NO_IDS:
        out = members(
            rows, cols, num_rows, num_cols, first_row, excluded, excluded_stride, excluded_rows, excluded_cols,
            EXCLUDED, EXCLUDED_IDS,
        )  # fmt: skip
    if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
        among = members(
            rows, cols, num_rows, num_cols, first_row, positive, positive_stride, positive_rows, positive_cols,
            POSITIVE, POSITIVE_IDS,
        )  # fmt: skip
        some = POSITIVE_IDS != NO_IDS or any_named(
            block_row * BM, cols, num_cols, first_row, positive, positive_stride, POSITIVE, BM
        )
        if some:
            if TARGETS & OF_ROWS:
                at = at_rows + stride_rows
                _write_sums(of_rows, at, here_rows, here_cols, tl.where(among, logits, 0.0), 1)
            if TARGETS & OF_COLS:
                at = at_cols + stride_cols
                _write_sums(of_cols, at, here_cols, here_rows, tl.where(among, logits, 0.0), 0)
        else:
            if TARGETS & OF_ROWS:
                tl.store(of_rows + at_rows + stride_rows, tl.zeros((BM,), tl.float32), mask=here_rows)
            if TARGETS & OF_COLS:
                tl.store(of_cols + at_cols + stride_cols, tl.zeros((BN,), tl.float32), mask=here_cols)
    if LOGITS & (OF_ROWS | OF_COLS):
        candidates = tl.full((BM, BN), 1.0 if CANDIDATES != POSITIVES else 0.0, tl.float32)
        if EXCLUDED > 0 or EXCLUDED_IDS != NO_IDS:
            candidates = tl.where(out, 0.0, candidates)
        if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
            candidates = tl.where(among, 0.0 if CANDIDATES == NEGATIVES else 1.0, candidates)
        if LOGITS & OF_ROWS:
            at = at_rows + (2 if TARGETS & OF_ROWS else 1) * stride_rows
            _write_sums(of_rows, at, here_rows, here_cols, logits * candidates, 1)
            _write_sums(of_rows, at + stride_rows, here_rows, here_cols, candidates, 1)
        if LOGITS & OF_COLS:
            at = at_cols + (2 if TARGETS & OF_COLS else 1) * stride_cols
            _write_sums(of_cols, at, here_cols, here_rows, logits * candidates, 0)
            _write_sums(of_cols, at + stride_cols, here_cols, here_rows, candidates, 0)
    exponentials = tl.exp2(exponents)
    of_candidates = exponentials
    if CANDIDATES == POSITIVES:
        of_candidates = tl.zeros((BM, BN), tl.float32)
    elif EXCLUDED > 0 or EXCLUDED_IDS != NO_IDS:
        of_candidates = tl.where(out, 0.0, exponentials)
    if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
        of_candidates = tl.where(among, 0.0 if CANDIDATES == NEGATIVES else exponentials, of_candidates)
    if KEEP:
        at = rows[:, None] * num_cols + cols[None, :]  # a tile has fewer than 2^31 entries
        tl.store(kept + at, of_candidates.to(kept.dtype.element_ty), mask=here_rows[:, None] & here_cols[None, :])
    if OF_ROWS:
        _write_sums(of_rows, at_rows, here_rows, here_cols, of_candidates, 1)
    if OF_COLS:
        _write_sums(of_cols, at_cols, here_cols, here_rows, of_candidates, 0)


@triton.jit
def _weights(
    of_rows, of_cols, rows, cols, num_rows, num_cols,
    FIELD: tl.constexpr, SLOT: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr,
):  # fmt: skip
    """Return the sum of the rows' and the columns' weights of a field, of which at least one exists."""
    if FIELD & OF_ROWS:
        found = tl.load(of_rows + SLOT * num_rows + rows, mask=rows < num_rows, other=0.0)[:, None]
    if FIELD & OF_COLS:
        here = tl.load(of_cols + SLOT * num_cols + cols, mask=cols < num_cols, other=0.0)[None, :]
        found = found + here if FIELD & OF_ROWS else here
    return found


@triton.jit(do_not_specialize=ANY)
def tile_gradient(
    x, y, gradient, totals, of_rows, of_cols, kept, row_scale, row_shift, col_scale,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y, log2_scale, log2_shift,
    POSITIVE: tl.constexpr, POSITIVE_IDS: tl.constexpr, EXCLUDED: tl.constexpr, EXCLUDED_IDS: tl.constexpr,
    CANDIDATES: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, BY_ROW: tl.constexpr, BY_COL: tl.constexpr,
    KEPT: tl.constexpr, TOTALS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write dS of a tile, (rows, columns), given weights of its rows and columns, (fields, rows) and (fields, columns).

    With TOTALS, also write sum_j dS_ij, (blocks of columns, rows).
    """
    _, block_col, rows, cols, here_rows, here_cols = place(num_rows, num_cols, BM, BN, GROUP)
    at, here = rows[:, None] * num_cols + cols[None, :], here_rows[:, None] & here_cols[None, :]
    if BY_ROW:
        scales = tl.load(row_scale + rows, mask=here_rows, other=0.0)
    if KEPT:
        exponentials = tl.load(kept + at, mask=here, other=0.0).to(tl.float32)
    else:
        exponents = similarities(
            x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, ALIGNED, BK, PRECISION, WIDEN
        )
        if BY_ROW:
            shifts = tl.load(row_shift + rows, mask=here_rows, other=0.0)
            if BY_COL:
                exponents *= tl.load(col_scale + cols, mask=here_cols, other=0.0)[None, :]
            exponents = exponents * (scales * log2_scale)[:, None] - shifts[:, None]
        else:
            exponents = exponents * log2_scale - log2_shift
        exponentials = tl.exp2(exponents)
    weighted = exponentials * _weights(
        of_rows, of_cols, rows, cols, num_rows, num_cols, EXPONENTIALS, 0, OF_ROWS, OF_COLS
    )
    if LOGITS & (OF_ROWS | OF_COLS):
        weighted += _weights(of_rows, of_cols, rows, cols, num_rows, num_cols, LOGITS, 2, OF_ROWS, OF_COLS)
    made = weighted
    if EXCLUDED > 0 or EXCLUDED_IDS != NO_IDS:
        out = members(
            rows, cols, num_rows, num_cols, first_row, excluded, excluded_stride, excluded_rows, excluded_cols,
            EXCLUDED, EXCLUDED_IDS,
        )  # fmt: skip
        made = tl.where(out, 0.0, made)
    if POSITIVE > 0 or POSITIVE_IDS != NO_IDS:
        among = members(
            rows, cols, num_rows, num_cols, first_row, positive, positive_stride, positive_rows, positive_cols,
            POSITIVE, POSITIVE_IDS,
        )  # fmt: skip
        of_positives = tl.zeros((BM, BN), tl.float32) if CANDIDATES == NEGATIVES else weighted
        if TARGETS & (OF_ROWS | OF_COLS):
            of_positives += _weights(of_rows, of_cols, rows, cols, num_rows, num_cols, TARGETS, 1, OF_ROWS, OF_COLS)
        made = tl.where(among, of_positives, 0.0 if CANDIDATES == POSITIVES else made)
    elif CANDIDATES == POSITIVES:
        made = tl.zeros((BM, BN), tl.float32)
    if TOTALS:
        summed = tl.sum(tl.where(here_cols[None, :], made, 0.0), 1)
        tl.store(totals + block_col.to(tl.int64) * num_rows + rows, summed, mask=here_rows)
    if BY_ROW:
        made *= scales[:, None]
        if BY_COL:
            made *= tl.load(col_scale + cols, mask=here_cols, other=0.0)[None, :]
    tl.store(gradient + at, made.to(gradient.dtype.element_ty), mask=here)
