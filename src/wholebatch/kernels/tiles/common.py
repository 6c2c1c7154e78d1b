"""The parts that all kernels share: the place of a program's block in a tile, its similarities, and sets of entries.

Rows, columns and ids are relative to the tile of a call. A set of entries consists of those that columns name, each
column its rows (int32; -1: none), and of those whose row and column have equal ids (int32).
"""

from __future__ import annotations

import triton
import triton.language as tl

# How equal ids change a set of named entries.
NO_IDS = tl.constexpr(0)
OR_EQUAL_IDS = tl.constexpr(1)  # added to the named ones
EQUAL_IDS_BUT = tl.constexpr(2)  # without the named ones

# The number of rows and the first row differ from tile to tile, which must not compile a kernel again.
ANY = ["num_rows", "first_row"]


@triton.jit
def place(num_rows, num_cols, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Return the program's blocks of rows and of columns, their rows and columns, and masks of those that exist."""
    down, across = tl.cdiv(num_rows, BM), tl.cdiv(num_cols, BN)
    block_row, block_col = place_of(tl.program_id(0), down, across, GROUP)
    rows, cols = block_row * BM + tl.arange(0, BM), block_col * BN + tl.arange(0, BN)
    return block_row, block_col, rows, cols, rows < num_rows, cols < num_cols


@triton.jit
def place_of(program, down, across, GROUP: tl.constexpr):
    """Return the block of rows and the block of columns of a program.

    Programs go through GROUP blocks of rows at a time, so that Y stays in the L2 cache.
    """
    first = program // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def with_products(
    total, x, y, rows, cols, num_rows, num_cols, first, stop, stride_x, stride_y,
    ALIGNED: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the products of the features from `first` to `stop` to `total`; strides are in units of ALIGNED.

    From the multiplication by ALIGNED the compiler knows how many features one load may take. Rows beyond the last
    repeat the last row; their results are not used.
    """
    of_rows = x + tl.minimum(rows, num_rows - 1).to(tl.int64)[:, None] * (stride_x * ALIGNED)
    of_cols = y + tl.minimum(cols, num_cols - 1).to(tl.int64)[:, None] * (stride_y * ALIGNED)
    for at in range(first, stop, BK):
        features = at + tl.arange(0, BK)[None, :]
        a = tl.load(of_rows + features, mask=features < stop, other=0.0)
        b = tl.load(of_cols + features, mask=features < stop, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit
def similarities(
    x, y, rows, cols, num_rows, num_cols, dim, stride_x, stride_y,
    BM: tl.constexpr, BN: tl.constexpr,
    ALIGNED: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return x_i . y_j, summed in float32; `dim` is in units of ALIGNED, like the strides."""
    return with_products(
        tl.zeros((BM, BN), tl.float32), x, y, rows, cols, num_rows, num_cols, 0, dim * ALIGNED, stride_x, stride_y,
        ALIGNED, BK, PRECISION, WIDEN,
    )  # fmt: skip


@triton.jit
def members(
    rows, cols, num_rows, num_cols, first_row, named, stride_named, row_ids, col_ids,
    NAMED: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Return a mask of the entries in a set that is not empty: it has NAMED rows for each column, or ids."""
    if NAMED > 0:
        found = rows[:, None] == (tl.load(named + cols, mask=cols < num_cols, other=-1) - first_row)[None, :]
        for at in tl.static_range(1, NAMED):
            other = tl.load(named + at * stride_named + cols, mask=cols < num_cols, other=-1) - first_row
            found |= rows[:, None] == other[None, :]
        if IDS == NO_IDS:
            return found
    of_rows = tl.load(row_ids + rows, mask=rows < num_rows, other=0)
    of_cols = tl.load(col_ids + cols, mask=cols < num_cols, other=0)
    equal = of_rows[:, None] == of_cols[None, :]
    if NAMED > 0:
        equal = (equal | found) if IDS == OR_EQUAL_IDS else (equal & (found == 0))
    return equal


@triton.jit
def any_named(first, cols, num_cols, first_row, named, stride_named, NAMED: tl.constexpr, BM: tl.constexpr):
    """Whether a column names one of the BM rows from `first` on, which is false for most blocks."""
    found = 0
    for at in tl.static_range(0, NAMED):
        of_cols = tl.load(named + at * stride_named + cols, mask=cols < num_cols, other=-1) - first_row - first
        found += tl.sum(tl.where((of_cols >= 0) & (of_cols < BM), 1, 0), 0)
    return found > 0
