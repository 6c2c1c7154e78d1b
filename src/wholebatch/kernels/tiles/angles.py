"""Kernels of the angles between embeddings and the centers of their classes; their formulas are `heads.angles`'.

    target_chords      x, w, targets -> |w|, and of the unit vectors a = |x - w| and b = |x + w|
    target_gradients   a, b, dL/dangle, dL/d|w| -> dL/dx, and dL/dw of each pair

The sine and cosine of half the angle are a / h and b / h, h^2 = a^2 + b^2.

A program takes some embeddings, and goes through their targets, one after the other. All is computed in float64, in
which no square of a number of float32 overflows or underflows. A target below 0 is on another rank: its center is read
as zeros. Rows whose CLAMP is set are divided by max(norm, EPS), others by their norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import row_features


@triton.jit
def _norms(x, rows, known, dim, stride, CLAMP: tl.constexpr, EPS: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr):
    """Return the norms of rows, and the divisors; 1 and 1 of rows that are not known."""
    squares = tl.zeros((BM,), tl.float64)
    for start in range(0, dim, BK):
        some = row_features(x, rows, known, start, dim, stride, BK).to(tl.float64)
        squares += tl.sum(some * some, 1)
    norm = tl.where(known, tl.sqrt(squares), 1.0)
    divisor = norm
    if CLAMP:
        divisor = tl.maximum(norm, tl.full((BM,), EPS, tl.float64))  # Triton 3.6 rounds a plain number to float32
    return norm, divisor


@triton.jit
def _target(targets, index, rows, valid, slot, slots):
    """Return each embedding's target, the row of its center, and whether there is one here."""
    target = tl.load(targets + rows * slots + slot, mask=valid, other=-1)
    row, here = target, target >= 0
    if index is not None:
        row = tl.load(index + target, mask=here, other=0)
    return target, row, here


@triton.jit
def _missing(norm_x, divisor_x, norm_w, divisor_w):
    """Return (1 - |x|^2) + (1 - |w|^2) of rows after division."""
    short_x, short_w = norm_x / divisor_x, norm_w / divisor_w
    return (1 - short_x * short_x) + (1 - short_w * short_w)


@triton.jit(do_not_specialize=["num_rows", "slots"])
def target_chords(
    x, centers, targets, index, lengths, apart, together, num_rows, slots, dim, stride_x, stride_w,
    CLAMP_X: tl.constexpr, CLAMP_W: tl.constexpr, EPS: tl.constexpr,
    ALIGNED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write |w|, |x - w| and |x + w|, (rows, slots), float64; 0, 0 and 1 where the center is on another rank."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    valid = rows < num_rows
    dim, stride_x, stride_w = dim * ALIGNED, stride_x * ALIGNED, stride_w * ALIGNED
    norm_x, divisor_x = _norms(x, rows, valid, dim, stride_x, CLAMP_X, EPS, BM, BK)
    for slot in range(slots):
        _, row, here = _target(targets, index, rows, valid, slot, slots)
        norm_w, divisor_w = _norms(centers, row, here, dim, stride_w, CLAMP_W, EPS, BM, BK)
        missing = _missing(norm_x, divisor_x, norm_w, divisor_w)
        minus, plus = missing, missing
        for start in range(0, dim, BK):
            a = row_features(x, rows, valid, start, dim, stride_x, BK).to(tl.float64) / divisor_x[:, None]
            b = row_features(centers, row, here, start, dim, stride_w, BK).to(tl.float64) / divisor_w[:, None]
            minus += tl.sum((a - b) * (a - b), 1)
            plus += tl.sum((a + b) * (a + b), 1)
        place = rows * slots + slot
        tl.store(lengths + place, tl.where(here, norm_w, 0.0), mask=valid)
        tl.store(apart + place, tl.where(here, tl.sqrt(minus), 0.0), mask=valid)
        tl.store(together + place, tl.where(here, tl.sqrt(plus), 1.0), mask=valid)


@triton.jit(do_not_specialize=["num_rows", "slots", "stride_grad", "stride_lengths", "num_targets"])
def target_gradients(
    x, centers, targets, index, apart, together, grad, length_grads, x_grad, center_grads, pair_targets,
    num_rows, slots, dim, stride_x, stride_w, stride_grad, stride_lengths, num_targets,
    CLAMP_X: tl.constexpr, CLAMP_W: tl.constexpr, EPS: tl.constexpr, SAME: tl.constexpr,
    ALIGNED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write dL/dx, (rows, d), dL/dw of each pair, (rows slots, d), and its target.

    Where the center is on another rank, dL/dw is 0 and the target any: different ones, for a sum whose order is free.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    valid = rows < num_rows
    dim, stride_x, stride_w = dim * ALIGNED, stride_x * ALIGNED, stride_w * ALIGNED
    norm_x, divisor_x = _norms(x, rows, valid, dim, stride_x, CLAMP_X, EPS, BM, BK)
    for slot in range(slots):
        target, row, here = _target(targets, index, rows, valid, slot, slots)
        place = rows * slots + slot
        minus, plus = tl.load(apart + place, mask=here, other=0.0), tl.load(together + place, mask=here, other=1.0)
        weight = tl.load(grad + rows * stride_grad + slot, mask=here, other=0.0)
        length_grad = tl.zeros((BM,), tl.float64)
        if length_grads is not None:
            length_grad = tl.load(length_grads + rows * stride_lengths + slot, mask=here, other=0.0)
        norm_w, divisor_w = _norms(centers, row, here, dim, stride_w, CLAMP_W, EPS, BM, BK)
        both = minus * minus + plus * plus
        half = tl.where(minus < plus, 2 * minus * minus, -2 * plus * plus) / both
        sign = tl.where(minus < plus, -1.0, 1.0)  # of x in w -+ x, which is short
        known = tl.minimum(minus, plus) > SAME
        if center_grads is not None:
            tl.store(pair_targets + place, tl.where(here, target, place % num_targets), mask=valid)
        slope = tl.where(known, -weight * both / tl.where(known, 2 * minus * plus, 1.0), 0.0)
        clamped_x, clamped_w = (norm_x < divisor_x)[:, None], (norm_w < divisor_w)[:, None]
        by_x, by_w, by_length = slope / divisor_x, slope / divisor_w, length_grad / norm_w
        for start in range(0, dim, BK):
            features = start + tl.arange(0, BK)
            inside = valid[:, None] & (features < dim)[None, :]
            center = row_features(centers, row, here, start, dim, stride_w, BK).to(tl.float64)
            a = row_features(x, rows, valid, start, dim, stride_x, BK).to(tl.float64) / divisor_x[:, None]
            b = center / divisor_w[:, None]
            away_x = tl.where(clamped_x, b, b + sign[:, None] * a + half[:, None] * a) * by_x[:, None]
            if x_grad is not None:
                into = x_grad + rows[:, None] * dim + features[None, :]
                total = tl.load(into, mask=inside & (slot > 0), other=0.0)
                tl.store(into, (total + away_x).to(tl.float32).to(x_grad.dtype.element_ty), mask=inside)
            if center_grads is not None:
                away_w = tl.where(clamped_w, a, a + sign[:, None] * b + half[:, None] * b) * by_w[:, None]
                away_w += center * by_length[:, None]
                into = center_grads + place[:, None] * dim + features[None, :]
                tl.store(into, away_w.to(tl.float32).to(center_grads.dtype.element_ty), mask=inside)
