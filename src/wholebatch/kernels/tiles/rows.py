"""Kernels that make one pass over the rows of features: their numbers at a loss's entry, and the end of its gradient.

    row_numbers     x_i, y_i -> |x_i|, |y_i|, x_i . y_i, and their extremes
    side_weights    dL/dA_i, R_i -> N dL/dA_i / R_i, and the largest N |dL/dA_i|
    pair_losses     R_i, R'_i, x_i . y_i -> the cross-entropy of a pair in its row, and in its column
    pair_weights    the derivative by it -> weights of E in dS, as those of `side_weights`, and of the pair's own logit
    row_gradient    U_i -> f (u U_i + t_i y_i), and <x_i, .>; where rows are normalized, z_i = x_i / |x_i|, this is
                    divided by |x_i| unless DIVIDED, and its part along z_i is removed

A norm is computed from the row times a power of two, which moves its largest entry near 1, so that no square overflows
or underflows. An extreme is NaN if one of its numbers is. Numbers are written for each block of rows, and reduced
afterward in PyTorch.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import row_features

ANY = ["rows_x", "rows_y", "rows", "cols", "num_rows", "pairs", "size", "factor", "term_factor"]


@triton.jit
def _largest(values):
    """Return the largest value; NaN if one is."""
    odd = tl.sum(tl.where(values != values, 1, 0), 0)
    return tl.where(odd > 0, float("nan"), tl.max(values, 0))


@triton.jit
def _powers(x, rows, valid, dim, stride, BM: tl.constexpr, BK: tl.constexpr):
    """Return for each row the power of two that brings its largest entry to [1, 2); near it for extreme rows."""
    largest = tl.zeros((BM,), tl.float32)
    for start in range(0, dim, BK):
        largest = tl.maximum(largest, tl.max(tl.abs(row_features(x, rows, valid, start, dim, stride, BK)), 1))
    largest = tl.minimum(tl.maximum(largest, 2.0**-94), 2.0**95)
    return 1.0 / (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=ANY)
def row_numbers(
    x, y, scale, bias, products, norms_x, norms_y, out,
    rows_x, rows_y, dim, stride_x, stride_y,
    SCALARS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write (blocks, 3 + SCALARS): the largest norms, the largest -x_i . y_i, scale and bias; and those of each row."""
    block = tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    here_x, here_y = rows < rows_x, rows < rows_y
    dim, stride_x, stride_y = dim * ALIGNED, stride_x * ALIGNED, stride_y * ALIGNED
    power_x = _powers(x, rows, here_x, dim, stride_x, BM, BK)
    power_y = _powers(y, rows, here_y, dim, stride_y, BM, BK)
    squares_x, squares_y = tl.zeros((BM,), tl.float32), tl.zeros((BM,), tl.float32)
    inner = tl.zeros((BM,), tl.float32)
    for start in range(0, dim, BK):
        a = row_features(x, rows, here_x, start, dim, stride_x, BK)
        b = row_features(y, rows, here_y, start, dim, stride_y, BK)
        inner += tl.sum(a * b, 1)
        a, b = a * power_x[:, None], b * power_y[:, None]
        squares_x += tl.sum(a * a, 1)
        squares_y += tl.sum(b * b, 1)
    norm_x, norm_y = tl.sqrt(squares_x) / power_x, tl.sqrt(squares_y) / power_y
    out += block * (3 + SCALARS)
    tl.store(out, _largest(norm_x).to(tl.float64))
    tl.store(out + 1, _largest(norm_y).to(tl.float64))
    both = here_x & here_y
    tl.store(out + 2, _largest(tl.where(both, -inner, float("-inf"))).to(tl.float64))
    if SCALARS > 0:
        tl.store(out + 3, tl.load(scale).to(tl.float64))
    if SCALARS > 1:
        tl.store(out + 4, tl.load(bias).to(tl.float64))
    tl.store(products + rows, inner, mask=both)
    tl.store(norms_x + rows, norm_x, mask=here_x)
    tl.store(norms_y + rows, norm_y, mask=here_y)


@triton.jit
def _weigh(grads, sums, weights, largest, block, count, stride, size, BLOCK: tl.constexpr):
    """Write N a_i / R_i of a block, 0 where a_i is, and the largest N |a_i|."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < count
    grad = tl.load(grads + offsets * stride, mask=valid, other=0.0) * size
    total = tl.where(grad == 0, 1.0, tl.load(sums + offsets, mask=valid, other=1.0))
    tl.store(weights + offsets, (grad / total).to(tl.float32), mask=valid)
    tl.store(largest, _largest(tl.abs(grad)))


@triton.jit(do_not_specialize=ANY)
def side_weights(
    row_grads, row_sums, col_grads, col_sums, row_weights, col_weights, largest,
    rows, cols, stride_rows, stride_cols, size, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write N a_i / R_i of rows and of columns, and (2, blocks of both): the largest N |a_i| of each block."""
    block, row_blocks, blocks = tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)
    if block < row_blocks:
        _weigh(row_grads, row_sums, row_weights, largest + block, block, rows, stride_rows, size, BLOCK)
        tl.store(largest + blocks + block, 0.0)
    else:
        tl.store(largest + block, 0.0)
        largest += blocks + block
        _weigh(col_grads, col_sums, col_weights, largest, block - row_blocks, cols, stride_cols, size, BLOCK)


@triton.jit
def _target(products, numbers, offsets, valid):
    """Return the logit of each pair less the shift, in units of log 2, float64."""
    scale, shift = tl.load(numbers).to(tl.float64), tl.load(numbers + 1).to(tl.float64)
    return tl.load(products + offsets, mask=valid, other=0.0).to(tl.float64) * scale - shift


@triton.jit
def _cross_entropy(sums, target, offsets, valid):
    """Return log(1 + R_i / exp(T_i)), exact to rounding."""
    total = tl.load(sums + offsets, mask=valid, other=1.0)
    x = tl.log2(tl.where(total == 0, 1.0, total)) - target
    small = tl.exp2(-tl.abs(x))
    above = (1.0 + small) - 1.0
    log = tl.where(above == 0, small, tl.log(1.0 + small) * (small / tl.where(above == 0, 1.0, above)))
    return tl.where(total == 0, 0.0, tl.maximum(x, 0.0) * 0.6931471805599453 + log)


@triton.jit(do_not_specialize=ANY)
def pair_losses(
    row_sums, col_sums, products, numbers, losses, rows, BOTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Write the cross-entropy of each pair in its row, or with BOTH the mean of that and the one in its column."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < rows
    target = _target(products, numbers, offsets, valid)
    loss = _cross_entropy(row_sums, target, offsets, valid)
    if BOTH:
        loss = (loss + _cross_entropy(col_sums, target, offsets, valid)) / 2
    tl.store(losses + offsets, loss, mask=valid)


@triton.jit
def _weigh_pairs(grad, sums, positive, weights, largest, offsets, valid):
    """Write the weight of E in a side, g / (R_i + exp T_i), and the largest |g R_i / (R_i + exp T_i)|; return these."""
    total = tl.load(sums + offsets, mask=valid, other=0.0)
    both = total + positive
    weight = grad / tl.where(both == 0, 1.0, both)
    tl.store(weights + offsets, weight.to(tl.float32), mask=valid)
    tl.store(largest, _largest(tl.abs(weight * total)))
    return weight * total


@triton.jit(do_not_specialize=ANY)
def pair_weights(
    grads, row_sums, col_sums, products, numbers, row_weights, col_weights, terms, largest,
    rows, stride_grads, size, BOTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write weights of rows, with BOTH of columns, those of the pairs, and (2, blocks): the largest |dS| of each."""
    block = tl.program_id(0)
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    valid = offsets < rows
    grad = tl.load(grads + offsets * stride_grads, mask=valid, other=0.0).to(tl.float64) * size
    positive = tl.exp2(_target(products, numbers, offsets, valid))
    term = _weigh_pairs(grad, row_sums, positive, row_weights, largest + block, offsets, valid)
    largest += tl.num_programs(0) + block
    if BOTH:
        term += _weigh_pairs(grad, col_sums, positive, col_weights, largest, offsets, valid)
    else:
        tl.store(largest, 0.0)
    tl.store(terms + offsets, -term, mask=valid)


@triton.jit
def _gradient(
    products, other, rows, valid, start, pairs, dim, stride, term, unit, PAIRED: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Return some features of u U_i + t_i y_i; rows from `pairs` on have no y_i."""
    grad = row_features(products, rows, valid, start, dim, dim, BK) * unit
    if PAIRED:
        grad += term[:, None] * row_features(other, rows, valid & (rows < pairs), start, dim, stride, BK)
    return grad


@triton.jit(do_not_specialize=ANY)
def row_gradient(
    products, x, index, other, terms, norms, unit, out, shares,
    num_rows, pairs, dim, stride_x, stride_other, stride_terms, factor, term_factor,
    PAIRED: tl.constexpr, NORMED: tl.constexpr, DIVIDED: tl.constexpr, UNIT: tl.constexpr, LOADED: tl.constexpr,
    EPS: tl.constexpr, ALIGNED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write dX, (rows, d), and sum_i <x_i, u U_i + t_i y_i> of each block of rows."""
    block = tl.program_id(0)
    rows = block * BM + tl.arange(0, BM)
    valid = rows < num_rows
    dim, stride_x, stride_other = dim * ALIGNED, stride_x * ALIGNED, stride_other * ALIGNED
    product_scale = 1.0
    if UNIT:
        product_scale = tl.load(unit)
    x_rows = rows
    if index is not None:
        x_rows = tl.load(index + rows, mask=valid, other=0)
    times = factor
    if LOADED:
        times = tl.load(factor)
    term = tl.zeros((BM,), tl.float32)
    if PAIRED:
        term = (tl.load(terms + rows * stride_terms, mask=rows < pairs, other=0.0) * term_factor).to(tl.float32)
    if NORMED:
        norm = tl.load(norms + rows, mask=valid, other=1.0)
        divisor = tl.maximum(norm, EPS)
        if not DIVIDED:
            product_scale, term = (product_scale / divisor)[:, None], term / divisor
    along = tl.zeros((BM,), tl.float32)
    for start in range(0, dim, BK):
        grad = _gradient(products, other, rows, valid, start, pairs, dim, stride_other, term, product_scale, PAIRED, BK)
        along += tl.sum(row_features(x, x_rows, valid, start, dim, stride_x, BK) * grad, 1)
    tl.store(shares + block, tl.sum(along.to(tl.float64), 0))
    if NORMED:  # <z_i, U_i> = <x_i, U_i / |x_i|>
        removed = tl.where(norm >= EPS, along / divisor, 0.0)
    for start in range(0, dim, BK):
        grad = _gradient(products, other, rows, valid, start, pairs, dim, stride_other, term, product_scale, PAIRED, BK)
        if NORMED:
            grad -= row_features(x, x_rows, valid, start, dim, stride_x, BK) / divisor[:, None] * removed[:, None]
        features = start + tl.arange(0, BK)
        to = out + rows.to(tl.int64)[:, None] * dim + features[None, :]
        tl.store(to, (grad * times).to(out.dtype.element_ty), mask=valid[:, None] & (features < dim)[None, :])
