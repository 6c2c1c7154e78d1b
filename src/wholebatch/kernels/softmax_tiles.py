"""Tiles of the softmax sweep in Triton: similarities are computed, used and forgotten on the chip.

    tile_sums        S -> sum_j E_ij and sum_i E_ij of the candidates, and the same of x_i . y_j of the positives
    tile_gradient    S -> dS_ij = E_ij (r_i + c_j) of candidates, + t_i + t'_j of positives

with E_ij = exp(S_ij - shift) = 2^(x_i . y_j scale log2(e) - shift log2(e)): one product, one multiply-add and one `ex2`
for each entry. A program computes BM x BN entries. It writes one number for each of its rows and columns, to a place of
its own, and these are added up in a fixed order afterwards: no atomics, no locks, the same bits each time.

What dS has of the positives is added before dS is rounded to the features' dtype: where training has gone well, it
cancels all of E_ij (r_i + c_j), and outside of the tile a bfloat16 would be left of that.

A set of entries is those whose row and column have equal ids (int32), and diagonals. Of a diagonal each column is told
its row, once, so that an entry takes one comparison. Rows, columns, ids and diagonals are relative to the tile that a
call is given.
"""

from __future__ import annotations

import triton
import triton.language as tl

# What ids have to do with a set.
NO_IDS = tl.constexpr(0)
OR_EQUAL_IDS = tl.constexpr(1)  # beside diagonals
EQUAL_IDS_BUT = tl.constexpr(2)  # those on diagonals

# Which entries are candidates; positives are whether they are excluded or not.
NEGATIVES = tl.constexpr(0)
ALL = tl.constexpr(1)
POSITIVES = tl.constexpr(2)

# Where diagonals lie and how many rows there are differs from tile to tile, which is no reason to compile again.
_ANY = ["num_rows", *(f"{of}_{what}" for of in ("pa", "pb", "ea", "eb") for what in ("row", "col", "length"))]


@triton.jit
def _rows_on_diagonal(cols, first_row, first_col, length):
    """Of each column, its row; -1 where it has none."""
    along = cols - first_col
    return tl.where((along >= 0) & (along < length), along + first_row, -1)


@triton.jit
def _members(
    rows, cols, num_rows, num_cols, row_ids, col_ids, row_a, col_a, length_a, row_b, col_b, length_b,
    DIAGONALS: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Which of the entries are in a set."""
    if DIAGONALS > 0:
        on_diagonals = rows[:, None] == _rows_on_diagonal(cols, row_a, col_a, length_a)[None, :]
        if DIAGONALS > 1:
            on_diagonals |= rows[:, None] == _rows_on_diagonal(cols, row_b, col_b, length_b)[None, :]
        if IDS == NO_IDS:
            return on_diagonals
    of_rows = tl.load(row_ids + rows, mask=rows < num_rows, other=0)
    of_cols = tl.load(col_ids + cols, mask=cols < num_cols, other=0)
    equal = of_rows[:, None] == of_cols[None, :]
    if DIAGONALS > 0:
        equal = (equal | on_diagonals) if IDS == OR_EQUAL_IDS else (equal & (on_diagonals == 0))
    return equal


@triton.jit
def _place(num_rows, num_cols, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """The program's block of rows and of columns: GROUP blocks of rows at a time, so that Y stays in the L2 cache."""
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    program = tl.program_id(0)
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def _similarities(
    x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x_i . y_j, summed in float32. Rows behind the last are the last once more: what is made of them is not used."""
    of_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * stride_x + tl.arange(0, BK)[None, :]
    of_cols = y + tl.minimum(cols, num_cols - 1).to(tl.int64)[:, None] * stride_y + tl.arange(0, BK)[None, :]
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, dim, BK):
        here = (first + tl.arange(0, BK) < dim)[None, :]
        a = tl.load(of_rows + first, mask=here, other=0.0)
        b = tl.load(of_cols + first, mask=here, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit(do_not_specialize=_ANY)
def tile_sums(
    x, y, row_sums, col_sums, row_targets, col_targets,
    positive_rows, positive_cols, pa_row, pa_col, pa_length, pb_row, pb_col, pb_length,
    excluded_rows, excluded_cols, ea_row, ea_col, ea_length, eb_row, eb_col, eb_length,
    num_rows, num_cols, dim, stride_x, stride_y, log2_scale, log2_shift,
    POSITIVE_DIAGONALS: tl.constexpr, POSITIVE_IDS: tl.constexpr,
    EXCLUDED_DIAGONALS: tl.constexpr, EXCLUDED_IDS: tl.constexpr, CANDIDATES: tl.constexpr,
    OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, TARGETS_OF_ROWS: tl.constexpr, TARGETS_OF_COLS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Sums of a tile, (blocks of columns, rows) and (blocks of rows, columns): E of candidates, x . y of positives."""
    block_row, block_col = _place(num_rows, num_cols, BM, BN, GROUP)
    rows, cols = block_row * BM + tl.arange(0, BM), block_col * BN + tl.arange(0, BN)
    here_rows, here_cols = rows < num_rows, cols < num_cols
    to_rows, to_cols = block_col.to(tl.int64) * num_rows + rows, block_row.to(tl.int64) * num_cols + cols
    similar = _similarities(x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, BK, PRECISION, WIDEN)
    exponentials = tl.exp2(similar * log2_scale - log2_shift)
    of_candidates = exponentials
    if EXCLUDED_DIAGONALS > 0 or EXCLUDED_IDS != NO_IDS:
        excluded = _members(
            rows, cols, num_rows, num_cols, excluded_rows, excluded_cols,
            ea_row, ea_col, ea_length, eb_row, eb_col, eb_length, EXCLUDED_DIAGONALS, EXCLUDED_IDS,
        )  # fmt: skip
        of_candidates = tl.where(excluded, 0.0, of_candidates)
    if POSITIVE_DIAGONALS > 0 or POSITIVE_IDS != NO_IDS:
        positive = _members(
            rows, cols, num_rows, num_cols, positive_rows, positive_cols,
            pa_row, pa_col, pa_length, pb_row, pb_col, pb_length, POSITIVE_DIAGONALS, POSITIVE_IDS,
        )  # fmt: skip
        if TARGETS_OF_ROWS or TARGETS_OF_COLS:
            targets = tl.where(positive, similar, 0.0)
            if TARGETS_OF_ROWS:
                of_rows = tl.sum(tl.where(here_cols[None, :], targets, 0.0), 1)
                tl.store(row_targets + to_rows, of_rows, mask=here_rows)
            if TARGETS_OF_COLS:
                of_cols = tl.sum(tl.where(here_rows[:, None], targets, 0.0), 0)
                tl.store(col_targets + to_cols, of_cols, mask=here_cols)
        if CANDIDATES == NEGATIVES:
            of_candidates = tl.where(positive, 0.0, of_candidates)
        elif CANDIDATES == ALL:
            of_candidates = tl.where(positive, exponentials, of_candidates)
        else:
            of_candidates = tl.where(positive, exponentials, 0.0)
    elif CANDIDATES == POSITIVES:
        of_candidates = tl.zeros((BM, BN), tl.float32)
    if OF_ROWS:
        tl.store(row_sums + to_rows, tl.sum(tl.where(here_cols[None, :], of_candidates, 0.0), 1), mask=here_rows)
    if OF_COLS:
        tl.store(col_sums + to_cols, tl.sum(tl.where(here_rows[:, None], of_candidates, 0.0), 0), mask=here_cols)


@triton.jit(do_not_specialize=_ANY)
def tile_gradient(
    x, y, gradient, row_weights, col_weights, row_targets, col_targets,
    positive_rows, positive_cols, pa_row, pa_col, pa_length, pb_row, pb_col, pb_length,
    excluded_rows, excluded_cols, ea_row, ea_col, ea_length, eb_row, eb_col, eb_length,
    num_rows, num_cols, dim, stride_x, stride_y, log2_scale, log2_shift,
    POSITIVE_DIAGONALS: tl.constexpr, POSITIVE_IDS: tl.constexpr,
    EXCLUDED_DIAGONALS: tl.constexpr, EXCLUDED_IDS: tl.constexpr, CANDIDATES: tl.constexpr,
    OF_ROWS: tl.constexpr, OF_COLS: tl.constexpr, TARGETS_OF_ROWS: tl.constexpr, TARGETS_OF_COLS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """dS of a tile, (rows, columns), from numbers of its rows and columns."""
    block_row, block_col = _place(num_rows, num_cols, BM, BN, GROUP)
    rows, cols = block_row * BM + tl.arange(0, BM), block_col * BN + tl.arange(0, BN)
    here_rows, here_cols = rows < num_rows, cols < num_cols
    similar = _similarities(x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y, BM, BN, BK, PRECISION, WIDEN)
    exponentials = tl.exp2(similar * log2_scale - log2_shift)
    if OF_ROWS and OF_COLS:
        weights = tl.load(row_weights + rows, mask=here_rows, other=0.0)[:, None]
        weights = weights + tl.load(col_weights + cols, mask=here_cols, other=0.0)[None, :]
        weighted = exponentials * weights
    elif OF_ROWS:
        weighted = exponentials * tl.load(row_weights + rows, mask=here_rows, other=0.0)[:, None]
    else:
        weighted = exponentials * tl.load(col_weights + cols, mask=here_cols, other=0.0)[None, :]
    made = weighted
    if EXCLUDED_DIAGONALS > 0 or EXCLUDED_IDS != NO_IDS:
        excluded = _members(
            rows, cols, num_rows, num_cols, excluded_rows, excluded_cols,
            ea_row, ea_col, ea_length, eb_row, eb_col, eb_length, EXCLUDED_DIAGONALS, EXCLUDED_IDS,
        )  # fmt: skip
        made = tl.where(excluded, 0.0, made)
    if POSITIVE_DIAGONALS > 0 or POSITIVE_IDS != NO_IDS:
        positive = _members(
            rows, cols, num_rows, num_cols, positive_rows, positive_cols,
            pa_row, pa_col, pa_length, pb_row, pb_col, pb_length, POSITIVE_DIAGONALS, POSITIVE_IDS,
        )  # fmt: skip
        of_positives = tl.zeros((BM, BN), tl.float32) if CANDIDATES == NEGATIVES else weighted
        if TARGETS_OF_ROWS:
            of_positives += tl.load(row_targets + rows, mask=here_rows, other=0.0)[:, None]
        if TARGETS_OF_COLS:
            of_positives += tl.load(col_targets + cols, mask=here_cols, other=0.0)[None, :]
        made = tl.where(positive, of_positives, 0.0 if CANDIDATES == POSITIVES else made)
    elif CANDIDATES == POSITIVES:
        made = tl.zeros((BM, BN), tl.float32)
    at = rows[:, None] * num_cols + cols[None, :]  # a tile has fewer than 2^31 entries
    tl.store(gradient + at, made.to(gradient.dtype.element_ty), mask=here_rows[:, None] & here_cols[None, :])
