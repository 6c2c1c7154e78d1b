"""The kernels of the nested sweep: the similarities of several leading parts of the features at once, for one tile.

    S^l_ij = r^l_i q^l_j sum_{k < m_l} x_ik y_jk        r with the scale in it; E^l = exp(S^l - shift)

    nested_sums        sum_j E^l_ij, sum_i E^l_ij over the negatives, and S^l of positives
    nested_gradient    H^l = sum of G^l', l' >= l, with G^l = r^l_i q^l_j dS^l_ij,
                       dS^l_ij = E^l_ij (a^l_i + c^l_j) of negatives, t^l_i of positives; and sums of dS^l_ij S^l_ij

The products of a part are those of the previous part plus those of a few more features. The features from m_{l-1} to
m_l are multiplied with H^l, so the products take what the kernel writes as it is. When a part's products are computed,
those of later parts are not known yet; so all parts are computed twice: the first time H^1 is summed up, the second
time G^l is subtracted, part after part.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import ANY, NO_IDS, members, place_of, with_products, write

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _special(rows, cols, sets, KINDS: tl.constexpr):
    """Return masks of the positives, of which the batch has at least one, and of the entries that are no negatives."""
    among = members(rows, cols, sets[0], sets[1], sets[2], sets[3], sets, KINDS[0], KINDS[1])
    out = among
    if KINDS[2] > 0 or KINDS[3] != NO_IDS:
        out = among | members(rows, cols, sets[4], sets[5], sets[6], sets[7], sets, KINDS[2], KINDS[3])
    return among, out


@triton.jit(do_not_specialize=ANY)
def nested_sums(
    x, y, numbers, ends, row_sums, target_sums, col_sums, row_scales, col_scales,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, parts, stride_x, stride_y,
    KINDS: tl.constexpr, ENDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write the sums of a tile, (parts, blocks of columns, rows) and (parts, blocks of rows, columns)."""
    log2_shift = tl.load(numbers + 1)
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    block_row, block_col = place_of(tl.program_id(0), down, across, GROUP)
    row, col = block_row * BM, block_col * BN
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    here_rows, here_cols = rows < num_rows, cols < num_cols
    sets = (
        positive, positive_stride, positive_rows, positive_cols,
        excluded, excluded_stride, excluded_rows, excluded_cols, first_row, num_rows, num_cols,
    )  # fmt: skip
    among, out = _special(rows, cols, sets, KINDS)
    total = tl.zeros((BM, BN), tl.float32)
    first = 0
    for part in range(parts):
        stop = tl.load(ends + part)  # in units of ENDS
        total = with_products(
            total, x, y, row, col, num_rows, num_cols, first * ENDS, stop * ENDS, stride_x, stride_y,
            BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN,
        )  # fmt: skip
        first = stop
        row_scale = tl.load(row_scales + part * num_rows + rows, mask=here_rows, other=0.0)
        col_scale = tl.load(col_scales + part * num_cols + cols, mask=here_cols, other=0.0)
        logits = total * row_scale[:, None] * (col_scale * _LOG2_E)[None, :]
        exponentials = tl.where(out, 0.0, tl.exp2(logits - log2_shift))
        offsets = (part * across + block_col).to(tl.int64) * num_rows + rows
        tl.store(row_sums + offsets, tl.sum(tl.where(here_cols[None, :], exponentials, 0.0), 1), mask=here_rows)
        targets = tl.sum(tl.where(here_cols[None, :] & among, logits, 0.0), 1)
        tl.store(target_sums + offsets, targets / _LOG2_E, mask=here_rows)
        if col_sums is not None:
            offsets = (part * down + block_row).to(tl.int64) * num_cols + cols
            tl.store(col_sums + offsets, tl.sum(tl.where(here_rows[:, None], exponentials, 0.0), 0), mask=here_cols)


@triton.jit
def _gradient(
    total, first, part, x, y, ends, row, col, rows, cols, here_rows, here_cols, num_rows, num_cols,
    stride_x, stride_y, among, out, row_scales, col_scales, row_weights, row_targets, col_weights, log2_shift,
    ENDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return the products up to a part's end, that end, and the part's dS, S and r q."""
    stop = tl.load(ends + part)  # in units of ENDS
    total = with_products(
        total, x, y, row, col, num_rows, num_cols, first * ENDS, stop * ENDS, stride_x, stride_y,
        BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN,
    )  # fmt: skip
    row_scale = tl.load(row_scales + part * num_rows + rows, mask=here_rows, other=0.0)
    col_scale = tl.load(col_scales + part * num_cols + cols, mask=here_cols, other=0.0)
    scales = row_scale[:, None] * col_scale[None, :]
    logits = total * scales
    weights = tl.load(row_weights + part * num_rows + rows, mask=here_rows, other=0.0)[:, None]
    if col_weights is not None:
        weights = weights + tl.load(col_weights + part * num_cols + cols, mask=here_cols, other=0.0)[None, :]
    targets = tl.load(row_targets + part * num_rows + rows, mask=here_rows, other=0.0)
    grad = tl.where(out, 0.0, tl.exp2(logits * _LOG2_E - log2_shift) * weights)
    return total, stop, tl.where(among, targets[:, None], grad), logits, scales


@triton.jit(do_not_specialize=ANY)
def nested_gradient(
    x, y, numbers, gradient, ends, row_sums, col_sums, row_scales, col_scales, row_weights, row_targets, col_weights,
    positive, positive_stride, positive_rows, positive_cols, excluded, excluded_stride, excluded_rows, excluded_cols,
    first_row, num_rows, num_cols, parts, stride_x, stride_y, stride_gradient,
    KINDS: tl.constexpr, ENDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    BOXES: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Write H of a tile, (parts, rows, columns), and sums of dS S, (parts, blocks of columns, rows), and of columns."""
    log2_shift = tl.load(numbers + 1)
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    block_row, block_col = place_of(tl.program_id(0), down, across, GROUP)
    row, col = block_row * BM, block_col * BN
    rows, cols = row + tl.arange(0, BM), col + tl.arange(0, BN)
    here_rows, here_cols = rows < num_rows, cols < num_cols
    inside = here_rows[:, None] & here_cols[None, :]
    sets = (
        positive, positive_stride, positive_rows, positive_cols,
        excluded, excluded_stride, excluded_rows, excluded_cols, first_row, num_rows, num_cols,
    )  # fmt: skip
    among, out = _special(rows, cols, sets, KINDS)
    total, left = tl.zeros((BM, BN), tl.float32), tl.zeros((BM, BN), tl.float32)
    first = 0
    for part in range(parts):
        total, first, grad, logits, scales = _gradient(
            total, first, part, x, y, ends, row, col, rows, cols, here_rows, here_cols, num_rows, num_cols,
            stride_x, stride_y, among, out, row_scales, col_scales, row_weights, row_targets, col_weights, log2_shift,
            ENDS, BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN,
        )  # fmt: skip
        left += grad * scales
        products = tl.where(inside, grad * logits, 0.0)
        offsets = (part * across + block_col).to(tl.int64) * num_rows + rows
        tl.store(row_sums + offsets, tl.sum(products, 1), mask=here_rows)
        if col_sums is not None:
            offsets = (part * down + block_row).to(tl.int64) * num_cols + cols
            tl.store(col_sums + offsets, tl.sum(products, 0), mask=here_cols)
    write(gradient, row, col, rows, cols, here_rows, here_cols, stride_gradient, left, False)
    total = tl.zeros((BM, BN), tl.float32)
    first = 0
    for part in range(parts - 1):
        total, first, grad, _, scales = _gradient(
            total, first, part, x, y, ends, row, col, rows, cols, here_rows, here_cols, num_rows, num_cols,
            stride_x, stride_y, among, out, row_scales, col_scales, row_weights, row_targets, col_weights, log2_shift,
            ENDS, BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN,
        )  # fmt: skip
        left -= grad * scales
        gradient += num_rows.to(tl.int64) * stride_gradient
        write(gradient, row, col, rows, cols, here_rows, here_cols, stride_gradient, left, False)
