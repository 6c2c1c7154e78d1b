"""The kernels of the softmax sweep: the similarities of a tile are computed and used on the chip, and never stored.

    tile_sums        S -> sum_j E_ij and sum_i E_ij of the candidates; sums of S_ij of positives, and of candidates
    tile_gradient    S -> dS_ij = E_ij (r_i + c_j) + m_i + m'_j of candidates, + t_i + t'_j of positives

with E_ij = exp(S_ij - shift) = 2^(k x_i . y_j - c): one product, one multiply-add and one `ex2` for each entry. The two
float32 numbers k = scale log2(e) and c = shift log2(e) are read from memory. A program computes one block of BM x BN
entries after another. It writes one number for each row and column of a block, to a separate place, and these are added
in a fixed order afterward: no atomics, no locks, the same bits each time.

The positives' terms of dS are added before dS is rounded: after good training they cancel nearly all of
E_ij (r_i + c_j), and rounding before the addition would leave only bfloat16's errors.

Rows and columns may have a scale each, such as 1 / |x_i| and 1 / |y_j| for X and Y that are not normalized, and rows an
offset: the kernel then writes dS_ij times these scales, for products with X and Y as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ANY, NEGATIVES, NO_IDS, POSITIVES, any_named, choose, columns_of, place_of, similarities, write

_LOG_2 = tl.constexpr(0.6931471805599453)

# The sums of a side, and its weights in dS, a bit each. A side without the first bit does not exist.
EXPONENTIALS = tl.constexpr(1)
TARGETS = tl.constexpr(2)
LOGITS = tl.constexpr(4)  # and their number


@triton.jit
def _exponents(products, k, c, rows, cols, here_rows, here_cols, row_scale, row_offset, col_scale):
    """Return S - shift in units of log(2)."""
    if col_scale is not None:
        products *= tl.load(col_scale + cols, mask=here_cols, other=0.0)[None, :]
    if row_scale is None:
        exponents = products * k - c
    else:
        scales, shifts = tl.load(row_scale + rows, mask=here_rows, other=0.0) * k, tl.where(here_rows, c, 0.0)
        if row_offset is not None:
            shifts -= tl.load(row_offset + rows, mask=here_rows, other=0.0) / _LOG_2
        exponents = products * scales[:, None] - shifts[:, None]
    return exponents


@triton.jit
def _keep_candidates(values, rows, cols, sets, KINDS: tl.constexpr, CANDIDATES: tl.constexpr):
    """Return the values of candidates, and 0 elsewhere."""
    nothing = tl.zeros_like(values)
    return choose(
        nothing if CANDIDATES == POSITIVES else values, nothing if CANDIDATES == NEGATIVES else values, nothing,
        rows, cols, sets, KINDS,
    )  # fmt: skip


@triton.jit(do_not_specialize=ANY)
def tile_sums(
    x, y, numbers, row_sums, col_sums, row_scale, row_offset, col_scale,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y,
    KINDS: tl.constexpr, CANDIDATES: tl.constexpr, OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the sums of a tile, (fields, blocks of columns, rows) and (fields, blocks of rows, columns)."""
    ALL_FIELDS: tl.constexpr = OF_ROWS | OF_COLS
    sets = (
        positive, positive_stride, positive_rows, positive_cols,
        excluded, excluded_stride, excluded_rows, excluded_cols, first_row, num_rows, num_cols,
    )  # fmt: skip
    k, c = tl.load(numbers), tl.load(numbers + 1)
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    stride_rows, stride_cols = num_rows.to(tl.int64) * across, down.to(tl.int64) * num_cols  # num_cols may be constant
    for block in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=BOXES):
        block_row, block_col = place_of(block, down, across, GROUP)
        row, col = block_row * BM, block_col * BN
        products = similarities(
            x, y, row, col, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN
        )
        rows = row + tl.arange(0, BM)
        here_rows = rows < num_rows
        by_row, targets, logit_sums, counts = (tl.zeros((BM,), tl.float32),) * 4
        for part in tl.static_range(PARTS):
            first = col + part * (BN // PARTS)
            cols = first + tl.arange(0, BN // PARTS)
            here_cols = cols < num_cols
            inside = here_rows[:, None] & here_cols[None, :]
            if OF_COLS:
                to_cols = col_sums + block_row.to(tl.int64) * num_cols + cols
            block_part = columns_of(products, part, PARTS)
            exponents = _exponents(block_part, k, c, rows, cols, here_rows, here_cols, row_scale, row_offset, col_scale)
            # Sums of logits come first: then their registers are free for exponentials.
            if ALL_FIELDS > EXPONENTIALS:
                logits = tl.where(inside, (block_part * k if row_scale is None else exponents + c) * _LOG_2, 0.0)
                if TARGETS & ALL_FIELDS:
                    positive_logits = _keep_candidates(logits, rows, cols, sets, KINDS, POSITIVES)
                    targets += tl.sum(positive_logits, 1)
                    if TARGETS & OF_COLS:
                        tl.store(to_cols + stride_cols, tl.sum(positive_logits, 0), mask=here_cols)
                if LOGITS & ALL_FIELDS:
                    candidates = _keep_candidates(tl.where(inside, 1.0, 0.0), rows, cols, sets, KINDS, CANDIDATES)
                    logit_sums += tl.sum(logits * candidates, 1)
                    counts += tl.sum(candidates, 1)
                    if LOGITS & OF_COLS:
                        to_logits = to_cols + (2 if TARGETS & OF_COLS else 1) * stride_cols
                        tl.store(to_logits, tl.sum(logits * candidates, 0), mask=here_cols)
                        tl.store(to_logits + stride_cols, tl.sum(candidates, 0), mask=here_cols)
            exponentials = tl.exp2(exponents)
            special = True
            if ALL_FIELDS == EXPONENTIALS and KINDS[1] == NO_IDS and KINDS[3] == NO_IDS:
                # Most blocks have no special entry; no kernel is started where named positives are all candidates.
                special = (row + BM > num_rows) | (col + BN > num_cols)
                special |= any_named(row, cols, positive, positive_stride, sets, KINDS[0], BM)
                special |= any_named(row, cols, excluded, excluded_stride, sets, KINDS[2], BM)
            if special:
                exponentials = tl.where(inside, exponentials, 0.0)
                exponentials = _keep_candidates(exponentials, rows, cols, sets, KINDS, CANDIDATES)
            by_row += tl.sum(exponentials, 1)
            if OF_COLS:
                tl.store(to_cols, tl.sum(exponentials, 0), mask=here_cols)
        if OF_ROWS:
            to_rows = row_sums + block_col.to(tl.int64) * num_rows + rows
            tl.store(to_rows, by_row, mask=here_rows)
            if TARGETS & OF_ROWS:
                tl.store(to_rows + stride_rows, targets, mask=here_rows)
            if LOGITS & OF_ROWS:
                to_logits = to_rows + (2 if TARGETS & OF_ROWS else 1) * stride_rows
                tl.store(to_logits, logit_sums, mask=here_rows)
                tl.store(to_logits + stride_rows, counts, mask=here_rows)


@triton.jit
def _weights(row_field, col_field, rows, cols, num_rows, num_cols):
    """Return the sum of the rows' and the columns' weights of a field, of which at least one exists."""
    if row_field is not None:
        weights = tl.load(row_field + rows, mask=rows < num_rows, other=0.0)[:, None]
    if col_field is not None:
        col_weights = tl.load(col_field + cols, mask=cols < num_cols, other=0.0)[None, :]
        weights = col_weights if row_field is None else weights + col_weights
    return weights


@triton.jit(do_not_specialize=ANY)
def tile_gradient(
    x, y, numbers, gradient, totals, row_sum, row_target, row_logits, col_sum, col_target, col_logits,
    row_scale, row_offset, col_scale,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, dim, stride_x, stride_y, stride_gradient,
    KINDS: tl.constexpr, CANDIDATES: tl.constexpr, STORES: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write dS of a tile, (rows, columns), given weights of its rows and columns.

    With `totals`, also write sum_j dS_ij, (blocks of columns, rows).
    """
    sets = (
        positive, positive_stride, positive_rows, positive_cols,
        excluded, excluded_stride, excluded_rows, excluded_cols, first_row, num_rows, num_cols,
    )  # fmt: skip
    k, c = tl.load(numbers), tl.load(numbers + 1)
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    for block in tl.range(tl.program_id(0), down * across, PROGRAMS, flatten=BOXES):
        block_row, block_col = place_of(block, down, across, GROUP)
        row, col = block_row * BM, block_col * BN
        products = similarities(
            x, y, row, col, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN
        )
        rows = row + tl.arange(0, BM)
        here_rows = rows < num_rows
        summed = tl.zeros((BM,), tl.float32)
        for part in tl.static_range(PARTS):
            first = col + part * (BN // PARTS)
            cols = first + tl.arange(0, BN // PARTS)
            here_cols = cols < num_cols
            block_part = columns_of(products, part, PARTS)
            exponents = _exponents(block_part, k, c, rows, cols, here_rows, here_cols, row_scale, row_offset, col_scale)
            grad = tl.exp2(exponents) * _weights(row_sum, col_sum, rows, cols, num_rows, num_cols)
            if row_logits is not None or col_logits is not None:
                grad += _weights(row_logits, col_logits, rows, cols, num_rows, num_cols)
            nothing = tl.zeros_like(grad)
            positive_grad = nothing if CANDIDATES == NEGATIVES else grad
            if row_target is not None or col_target is not None:
                positive_grad += _weights(row_target, col_target, rows, cols, num_rows, num_cols)
            grad = nothing if CANDIDATES == POSITIVES else grad
            grad = choose(grad, positive_grad, nothing, rows, cols, sets, KINDS)
            if totals is not None:
                summed += tl.sum(tl.where(here_cols[None, :], grad, 0.0), 1)
            if row_scale is not None:
                grad *= tl.load(row_scale + rows, mask=here_rows, other=0.0)[:, None]
            if col_scale is not None:
                grad *= tl.load(col_scale + cols, mask=here_cols, other=0.0)[None, :]
            write(gradient, row, first, rows, cols, here_rows, here_cols, stride_gradient, grad, STORES)
        if totals is not None:
            tl.store(totals + block_col.to(tl.int64) * num_rows + rows, summed, mask=here_rows)
