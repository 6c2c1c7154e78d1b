"""The block of S that one program of a kernel computes at a time, for each form and architecture.

A block is as large as registers allow: with any of the versions of Triton that `make kernels` compiles, no form spills
on 9.0, and none more than a few registers elsewhere. Their compilers differ, so a form has room to spare where it can.

An SM has 65536 registers. With 4 warps, they are enough for two programs of 128 x 128, if shared memory is, too: one of
them computes exponentials and sums while the other one multiplies. That was the fastest form on an H100 nearly
everywhere, where tensor descriptors load features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_SHORT_DOCUMENT, _MOST_AT_ONCE = 32, 128  # tokens of a document; features of a step
_LONG = 768  # features from which sums of many rows are faster with one large program on an SM
_HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL = (9, 0), (10, 0), (12, 0)


@dataclass(frozen=True)
class Blocks:
    """The block of a tile that one program of a kernel computes."""

    # rows, cols: rows and columns of S
    rows: int
    cols: int
    depth: int  # features per step
    group: int  # blocks of rows that are computed together, for the cache
    # warps, stages: Triton's num_warps and num_stages
    warps: int
    stages: int
    parts: int = 1  # 1 or 2 parts of the columns, side by side, which are written to dS one after the other


class Form(NamedTuple):
    """The facts of a launch that decide how many registers and how much shared memory a program takes."""

    kernel: str
    capability: tuple[int, int]  # the compute capability
    dtype: torch.dtype  # of the features; float32 is multiplied in parts, three times
    features: int  # their number
    many_rows: bool = False  # whether the tile has 32768 rows or more
    named: int = 1  # the most rows that a column names in a set
    ids: bool = False  # whether entries with equal ids are in a set
    # entries: numbers that are computed for an entry beside the exponential, and sums beside the first of a side
    entries: int = 0
    unit: int = 0  # a divisor of the ends of the parts of the features, if there are parts; else 0
    document: int = 0  # the tokens of the longest document, of whose products there are maxima; 0: there are none

    @property
    def boxes(self) -> bool:
        """Whether tensor descriptors can describe the features."""
        return not self.document and self.dtype.itemsize == 2 and not self.features % 8


def blocks_of(form: Form, *, boxes: bool) -> Blocks:
    """Return the block of a form; `boxes`: tensor descriptors load features.

    >>> blocks_of(Form("tile_gradient", (9, 0), torch.bfloat16, 512), boxes=True)
    Blocks(rows=128, cols=128, depth=64, group=8, warps=4, stages=3, parts=2)
    """
    if form.document:
        return _documents_block(form)
    if form.dtype == torch.float32:
        return _float32_block(form)
    if form.unit:
        return _parts_block(form)
    narrow = form.ids or form.named > 1 or (form.entries > 0 and form.kernel != "tile_sigmoid")
    if boxes:
        is_new = form.capability >= _BLACKWELL  # where programs of 128 rows and 4 warps spill
        warps, sums = 8 if is_new else 4, form.kernel == "tile_sums"
        if narrow and sums and form.entries > 1:
            return Blocks(128, 64, 64, 8, 8, 3, parts=2)
        if narrow:
            return Blocks(64 if is_new else 128, 64, 64, 8, 4, 3)
        if sums and not is_new and form.features >= _LONG and form.many_rows:
            return Blocks(256, 128, 64, 8, 8, 4)
        return Blocks(128, 128, 64, 8, warps, 3, parts=1 if sums and not is_new else 2)
    if form.features % 8:
        return Blocks(64, 64, 64, 8, 8, 2)
    return Blocks(128, 64 if narrow else 128, 64, 8, 8, 3)


def _parts_block(form: Form) -> Blocks:
    """Return the block of a form with parts of the features, in 16 bits."""
    single_loads, two_totals = form.unit < 8, form.kernel == "nested_gradient"
    if form.capability >= _BLACKWELL:
        if two_totals:
            return Blocks(32, 64, 64, 8, 4, 2) if single_loads else Blocks(64, 64, 64, 8, 8, 3)
        return Blocks(64, 64, 64, 8, 4, 2 if single_loads else 3)
    return Blocks(64, 64, 64, 8, 8, 2) if single_loads else Blocks(128, 64, 64, 8, 8, 3)


def _documents_block(form: Form) -> Blocks:
    """Return the block of query tokens and of a document's: few of the latter, for a document's last block has a part.

    The features of a step are all that there are, if these are few: query tokens are then loaded once.
    """
    cols = 64 if form.document > _SHORT_DOCUMENT else 32
    features = max(16, _next_power(min(form.features, _MOST_AT_ONCE)))
    if form.kernel == "query_gradient":
        return Blocks(16, cols, features, 8, 4, 3)
    in_tensor_memory = _BLACKWELL <= form.capability < _CONSUMER_BLACKWELL
    if form.kernel == "document_gradient":
        # its two or three products share one sum, as those in `_float32_block`
        depth = min(features, 32 if form.dtype == torch.float32 else 64)
        return Blocks(32, cols, depth, 8, 4, 1 if in_tensor_memory else 2)
    if form.dtype == torch.float32 and in_tensor_memory:
        return Blocks(64, 64, 32, 8, 4, 1)  # as in `_float32_block`
    if form.dtype == torch.float32:
        return Blocks(64, cols if form.capability == _HOPPER else 32, 32, 8, 8, 2)
    if form.features > _MOST_AT_ONCE:
        return Blocks(128, cols, 64, 8, 8 if in_tensor_memory else 4, 3)
    return Blocks(128, cols, features, 8, 4, 3)


def _next_power(number: int) -> int:
    """Return the smallest power of two that is not smaller.

    >>> _next_power(96), _next_power(128)
    (128, 128)
    """
    return int(2 ** (number - 1).bit_length())


def _float32_block(form: Form) -> Blocks:
    """Return the block of a form of float32.

    Its three products share one sum, so steps must not overlap on the tensor cores of compute capability 10 and 11.
    There Triton up to 3.8 lets the products of a step begin before those of the last one have ended
    (triton-lang/triton#10821, seen on 10.3; linkedin/Liger-Kernel#1435, on 10.0).
    """
    low = form.kernel == "nested_gradient" or (form.unit > 0 and form.capability >= _CONSUMER_BLACKWELL)
    rows, cols = 32 if low else 64, 64 if form.entries or form.unit else 128
    if _BLACKWELL <= form.capability < _CONSUMER_BLACKWELL:
        return Blocks(rows, 64, 32, 8, 8 if low else 4, 1)
    return Blocks(rows, cols, 32, 8, 8, 2)
