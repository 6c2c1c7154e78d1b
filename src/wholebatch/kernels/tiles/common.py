"""The parts that kernels share: features of rows, the place of a block in a tile, its similarities, sets of entries.

Rows, columns and ids are relative to the tile of a call. A set of entries consists of those that columns name, each
column its rows (int32; -1: none), and of those whose row and column have equal ids (int32).

X and Y are tensor descriptors, from which the GPU copies boxes of features by itself, or pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How equal ids change a set of named entries.
NO_IDS = tl.constexpr(0)
OR_EQUAL_IDS = tl.constexpr(1)  # added to the named ones
EQUAL_IDS_BUT = tl.constexpr(2)  # without the named ones

# Which entries are candidates; a positive may be one even if it is excluded.
NEGATIVES = tl.constexpr(0)
ALL = tl.constexpr(1)
POSITIVES = tl.constexpr(2)

# The number of rows and the first row differ from tile to tile, which must not compile a kernel again.
ANY = ["num_rows", "first_row"]


@triton.jit
def row_features(x, rows, valid, start, dim, stride, BK: tl.constexpr):
    """Return some features of rows, float32; 0 beyond the last one, and in rows that do not exist."""
    features = start + tl.arange(0, BK)
    known = valid[:, None] & (features < dim)[None, :]
    return tl.load(x + rows.to(tl.int64)[:, None] * stride + features[None, :], mask=known, other=0.0).to(tl.float32)


@triton.jit
def place_of(block, down, across, GROUP: tl.constexpr):
    """Return the block of rows and the block of columns of a block.

    Blocks follow each other through GROUP blocks of rows at a time, so that Y stays in the L2 cache.
    """
    first = block // (GROUP * across) * GROUP
    height = tl.minimum(down - first, GROUP)
    within = block % (GROUP * across)
    return first + within % height, within // height


@triton.jit
def with_products(
    total, x, y, row, col, num_rows, num_cols, first, stop, stride_x, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the products of the features from `first` to `stop` to `total`; strides are in units of ALIGNED.

    From the multiplication by ALIGNED the compiler knows how many features one load may take. Rows beyond the last
    repeat the last row, or are 0 in boxes; their results are not used. In boxes, `stop` is the number of features or a
    multiple of BK.
    """
    if not BOXES:
        rows = tl.minimum(row + tl.arange(0, BM), num_rows - 1).to(tl.int64)
        cols = tl.minimum(col + tl.arange(0, BN), num_cols - 1).to(tl.int64)
        x_pointers, y_pointers = x + rows[:, None] * (stride_x * ALIGNED), y + cols[:, None] * (stride_y * ALIGNED)
    for start in range(first, stop, BK):
        if BOXES:
            a, b = x.load([row, start]), y.load([col, start])
        else:
            features = start + tl.arange(0, BK)[None, :]
            a = tl.load(x_pointers + features, mask=features < stop, other=0.0)
            b = tl.load(y_pointers + features, mask=features < stop, other=0.0)
        if WIDEN:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit
def similarities(
    x, y, row, col, num_rows, num_cols, dim, stride_x, stride_y,
    BM: tl.constexpr, BN: tl.constexpr, BOXES: tl.constexpr, ALIGNED: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Return x_i . y_j, summed in float32; `dim` is in units of ALIGNED, like the strides."""
    return with_products(
        tl.zeros((BM, BN), tl.float32), x, y, row, col, num_rows, num_cols, 0, dim * ALIGNED, stride_x, stride_y,
        BM, BN, BOXES, ALIGNED, BK, PRECISION, WIDEN,
    )  # fmt: skip


@triton.jit
def columns_of(total, PART: tl.constexpr, PARTS: tl.constexpr):
    """Return one of the 1 or 2 parts of a block, side by side: half of the registers, and of the memory to store it."""
    if PARTS == 2:
        halves = tl.permute(tl.reshape(total, (total.shape[0], 2, total.shape[1] // 2)), (0, 2, 1))
        left, right = tl.split(halves)
        total = left if PART == 0 else right
    return total


@triton.jit
def write(out, row, col, rows, cols, here_rows, here_cols, stride, values, BOXES: tl.constexpr):
    """Write a block of a tile, which has fewer than 2^31 entries."""
    values = values.to(out.dtype if BOXES else out.dtype.element_ty)
    if BOXES:
        out.store([row, col], values)
    else:
        tl.store(out + rows[:, None] * stride + cols[None, :], values, mask=here_rows[:, None] & here_cols[None, :])


@triton.jit
def members(
    rows, cols, named, stride_named, row_ids, col_ids, sets, NAMED: tl.constexpr, IDS: tl.constexpr
):  # fmt: skip
    """Return a mask of the entries in a set that is not empty: it has NAMED rows for each column, or ids."""
    first_row, num_rows, num_cols = sets[8], sets[9], sets[10]
    if NAMED > 0:
        matches = rows[:, None] == (tl.load(named + cols, mask=cols < num_cols, other=-1) - first_row)[None, :]
        for slot in tl.static_range(1, NAMED):
            other = tl.load(named + slot * stride_named + cols, mask=cols < num_cols, other=-1) - first_row
            matches |= rows[:, None] == other[None, :]
    if IDS != NO_IDS:
        block_row_ids = tl.load(row_ids + rows, mask=rows < num_rows, other=0)
        block_col_ids = tl.load(col_ids + cols, mask=cols < num_cols, other=-1)  # ids are not negative
        equal = block_row_ids[:, None] == block_col_ids[None, :]
        if NAMED > 0:
            equal = (equal | matches) if IDS == OR_EQUAL_IDS else (equal & (matches == 0))
        matches = equal
    return matches


@triton.jit
def choose(values, positive_values, excluded_values, rows, cols, sets, KINDS: tl.constexpr):
    """Return `values`, but `excluded_values` for the excluded entries, and `positive_values` for the positive ones.

    `sets` are the arguments of a kernel from `positive` to `num_cols`; KINDS[0] and [1] are the number of rows that a
    column names and the kind of ids of the positive entries, KINDS[2] and [3] those of the excluded ones.
    """
    if KINDS[2] > 0 or KINDS[3] != NO_IDS:
        out = members(rows, cols, sets[4], sets[5], sets[6], sets[7], sets, KINDS[2], KINDS[3])
        values = tl.where(out, excluded_values, values)
    if KINDS[0] > 0 or KINDS[1] != NO_IDS:
        among = members(rows, cols, sets[0], sets[1], sets[2], sets[3], sets, KINDS[0], KINDS[1])
        values = tl.where(among, positive_values, values)
    return values


@triton.jit
def any_named(row, cols, named, stride_named, sets, NAMED: tl.constexpr, BM: tl.constexpr):
    """Whether a column names one of the BM rows from `row` on, which is false for most blocks."""
    count = 0
    for slot in tl.static_range(0, NAMED):
        named_rows = tl.load(named + slot * stride_named + cols, mask=cols < sets[10], other=-1) - sets[8] - row
        count += tl.sum(tl.where((named_rows >= 0) & (named_rows < BM), 1, 0), 0)
    return count > 0
