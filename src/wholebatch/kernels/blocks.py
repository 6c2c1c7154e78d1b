"""The block of S that one program of a kernel computes, for each form and architecture.

A block is as large as registers allow: no form spills, on any architecture, with any of the versions of Triton that
`make kernels` compiles. Their compilers differ, so a form has room to spare where it can.

A feature that a program loads is used as often as the block is wide: 64 flops for a byte from the L2 cache for 128 x
128, 85 for 128 x 256. An SM has 65536 registers. With 8 warps, each of 128 registers or more, they are enough for one
program; with 4 warps for two, and one of them computes exponentials and sums while the other one multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass

_LONG = 512  # features from which the products take so long that a wider block is better than a second program
_SHORT_DOCUMENT, _MOST_AT_ONCE = 32, 128  # tokens of a document; features of a step
_AMPERE, _HOPPER, _BLACKWELL, _CONSUMER_BLACKWELL = (8, 0), (9, 0), (10, 0), (12, 0)


@dataclass(frozen=True)
class Blocks:
    """The block of a tile that one program of a kernel computes.

    Args:
        rows, cols: rows and columns of S.
        depth: features per step.
        group: blocks of rows that are computed together, for the cache.
        warps, stages: Triton's num_warps and num_stages.
    """

    rows: int
    cols: int
    depth: int
    group: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Form:
    """The facts of a launch that decide how many registers and how much shared memory a program takes.

    Args:
        capability: the compute capability.
        single: whether the features are float32, which are multiplied in parts, three times.
        features: their number.
        columns: of the tile; a single one is a constant to the compiler.
        compared: the number of comparisons for each entry.
        ids: whether ids are among them.
        lean: whether only the exponential of an entry is computed, and it is not kept.
        one_side: whether positives are summed up for one side alone.
        more: whether more than the exponential of an entry is computed.
        parts: whether products of several parts of the features are summed up.
        two_totals: whether two numbers are summed for each entry.
        single_loads: whether features have to be loaded one by one.
        no_product: whether exponentials are read instead of computed.
        document: the tokens of the longest document, of whose products there are maxima; 0: there are none.
    """

    capability: tuple[int, int]
    single: bool
    features: int
    columns: int
    compared: int
    ids: bool
    lean: bool = False
    one_side: bool = False
    more: bool = False
    parts: bool = False
    two_totals: bool = False
    single_loads: bool = False
    no_product: bool = False
    document: int = 0


def blocks_of(form: Form) -> Blocks:
    """Return the block of a form.

    >>> clip = Form((9, 0), single=False, features=256, columns=4096, compared=1, ids=False, lean=True)
    >>> blocks_of(clip)
    Blocks(rows=128, cols=128, depth=64, group=8, warps=4, stages=3)
    """
    if form.document:
        return _of_documents(form)
    if form.no_product:
        return Blocks(32, 128, 32, 8, 4, 1)
    if form.single:
        return _of_single(form)
    if form.parts and form.capability >= _BLACKWELL:
        if form.two_totals:
            return Blocks(32, 64, 64, 8, 4, 2) if form.single_loads else Blocks(64, 64, 64, 8, 8, 3)
        return Blocks(64, 64, 64, 8, 4, 2 if form.single_loads else 3)
    if form.single_loads:
        return Blocks(64, 64, 64, 8, 8, 2)
    if form.ids or form.more or form.compared > 2:
        return Blocks(128, 64, 64, 8, 8, 3)
    if form.lean and form.compared <= 1 and form.columns > 1:
        if form.capability == _AMPERE:
            return Blocks(128, 128, 32, 8, 4, 3)
        if form.capability == _HOPPER and form.features >= _LONG:
            return Blocks(128, 256, 64, 8, 8, 3)
        if form.capability == _HOPPER and not form.one_side:
            return Blocks(128, 128, 64, 8, 4, 3)
    return Blocks(128, 128, 64, 8, 8, 3)


def _of_documents(form: Form) -> Blocks:
    """Return the block of query tokens and of a document's: few of the latter, for a document's last block has a part.

    The features of a step are all that there are, if these are few: query tokens are then loaded once.
    """
    cols = 64 if form.document > _SHORT_DOCUMENT else 32
    in_tensor_memory = _BLACKWELL <= form.capability < _CONSUMER_BLACKWELL
    if form.single and in_tensor_memory:
        return Blocks(64, 64, 32, 8, 4, 1)  # as in `_of_single`
    if form.single:
        return Blocks(64, cols if form.capability == _HOPPER else 32, 32, 8, 8, 2)
    if form.features > _MOST_AT_ONCE:
        return Blocks(128, cols, 64, 8, 8 if in_tensor_memory else 4, 3)
    return Blocks(128, cols, max(16, _next_power(form.features)), 8, 4, 3)


def _next_power(number: int) -> int:
    """Return the smallest power of two that is not smaller.

    >>> _next_power(96), _next_power(128)
    (128, 128)
    """
    return int(2 ** (number - 1).bit_length())


def _of_single(form: Form) -> Blocks:
    """Return the block of a form of float32.

    Its three products share one sum, so steps must not overlap on the tensor cores of compute capability 10 and 11.
    There Triton up to 3.8 lets the products of a step begin before those of the last one have ended
    (triton-lang/triton#10821, seen on 10.3; linkedin/Liger-Kernel#1435, on 10.0).
    """
    low = form.two_totals or (form.parts and form.capability >= _CONSUMER_BLACKWELL)
    rows, cols = 32 if low else 64, 64 if form.more else 128
    if _BLACKWELL <= form.capability < _CONSUMER_BLACKWELL:
        return Blocks(rows, 64, 32, 8, 8 if low else 4, 1)
    return Blocks(rows, cols, 32, 8, 8, 2)
