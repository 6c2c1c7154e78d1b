"""How kernels are started: what a program's part is, on whose GPU, and how numbers reach it.

A kernel has E = 2^(k x . y - c) with k and c in float32, which is exp(S' - shift') for a scale and a shift that are as
near to those asked for as float32 comes. Logits of positives are taken with the same scale, and what is left of the
shift, exp(shift' - shift), is multiplied to sums and weights: all that is made of a similarity belongs together.

Partial sums of a row are added up in float64, in the order of the blocks: a call gives the same bits each time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from math import ceil, e, exp, gcd, log2
from typing import Any

import torch
from torch import Tensor

LOG2_E = log2(e)


@dataclass(frozen=True)
class Blocks:
    """What a program of a kernel does.

    Args:
        rows, cols: of S.
        depth: features at a time.
        group: blocks of rows that are worked on together.
        warps, stages: as Triton takes them.
    """

    rows: int
    cols: int
    depth: int
    group: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Entries:
    """A set of a tile's entries, as a kernel takes it.

    Args:
        named: (k, C), int32, rows of this rank that each column names, k times; -1: none. None: there are none.
        ids: 0: there are none; 1: entries with equal ids, too; 2: these, but for those that are named.
        rows: (R,) ids, int32; None without.
        cols: (C,) ids.
    """

    named: Tensor | None = None
    ids: int = 0
    rows: Tensor | None = None
    cols: Tensor | None = None

    @property
    def comparisons(self) -> int:
        """Of each entry."""
        return (0 if self.named is None else len(self.named)) + bool(self.ids)


@dataclass(frozen=True)
class OfRows:
    """Rows that have something of their own: S_ij = scale_i scale x_i . y_j + offset_i.

    Args:
        scales: (R,), float32.
        offsets: (R,), or None.
    """

    scales: Tensor
    offsets: Tensor | None


@dataclass(frozen=True)
class TileOf:
    """A tile of S, what is positive in it, and what is no candidate.

    Args:
        x: (R, d).
        y: (C, d).
        scale: of S.
        positive: the entries that are.
        excluded: those that are no candidates, unless they are positive.
        candidates: 0: the negatives, 1: these and positives, 2: positives alone.
        first_row: of the tile, among the rows that columns name.
        of_rows: what each row has of its own, or None.
        col_scales: (C,), float32: S_ij is times that, too; None: 1. Where there are some, there is `of_rows`.
    """

    x: Tensor
    y: Tensor
    scale: float
    positive: Entries
    excluded: Entries
    candidates: int
    first_row: int
    of_rows: OfRows | None = None
    col_scales: Tensor | None = None


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


_WIDE = (9, 0)  # shared memory for it have others, too, but on 10.0 it spills
_chosen: ContextVar[Blocks | None] = ContextVar("blocks", default=None)


@contextmanager
def using(blocks: Blocks) -> Iterator[None]:
    """All programs inside do these parts: to find out which are fast."""
    token = _chosen.set(blocks)
    try:
        yield
    finally:
        _chosen.reset(token)


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU."""
    return torch.cuda.get_device_capability(device)


def blocks_for(tile: TileOf, *, lean: bool = False) -> Blocks:
    """The part of a program: as much of S as registers hold, with no spilling on any architecture.

    Each of X's and Y's features that a program loads meets as many of the other's as the part is wide: 64 flops for a
    byte from the L2 cache for 128 x 128, 85 for 128 x 256. The wider one leaves an SM to one program, whose last steps
    nothing else hides: it is for long products.

    Args:
        tile: each entry is compared with what is in its sets, which takes registers. So does float32, which is
            multiplied in parts, three times.
        lean: whether nothing is made of an entry but its exponential, and that is not kept.
    """
    if (blocks := _chosen.get()) is not None:
        return blocks
    if interpreted():
        return Blocks(32, 64, 32, 2, 1, 1)
    if tile.x.dtype == torch.float32:
        return Blocks(64, 128, 32, 8, 8, 2)
    compared = sum(of.comparisons for of in (tile.positive, tile.excluded))
    if tile.positive.ids or tile.excluded.ids or compared > 2:
        return Blocks(128, 64, 64, 8, 8, 3)
    if lean and compared <= 1 and tile.x.shape[1] >= 512 and capability(tile.x.device) == _WIDE:
        return Blocks(128, 256, 64, 8, 8, 3)
    return Blocks(128, 128, 64, 8, 8, 3)


def parts(
    tile: TileOf, *, lean: bool = False, many: bool = False, twice: bool = False, odd: bool = False
) -> tuple[Blocks, tuple[int, int]]:
    """What a program does, and how many there are, down and across.

    Args:
        tile: of S.
        lean: as in :func:`blocks_for`.
        many: whether more is made of an entry than its exponential.
        twice: whether there are two numbers for each entry to be added up.
        odd: whether features have to be loaded one by one.
    """
    blocks, single = blocks_for(tile, lean=lean), tile.x.dtype == torch.float32
    if not interpreted():
        if many:
            blocks = replace(blocks, cols=64)
        if twice and (single or capability(tile.x.device) >= (10, 0)):
            blocks = replace(blocks, rows=32 if single else 64)
        if odd:
            blocks = replace(blocks, rows=min(blocks.rows, 64), stages=2)
    return blocks, (ceil(len(tile.x) / blocks.rows), ceil(len(tile.y) / blocks.cols))


def or_nothing(tile: TileOf, *given: Tensor | None) -> list[Tensor]:
    """What stands for a tensor that there is none of is not read."""
    return [tile.x if x is None else x for x in given]


def start(
    kernel: Any,
    tile: TileOf,
    blocks: Blocks,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    *,
    depth: int | None = None,
    **flags: Any,
) -> None:
    """One program for each part of the tile; `depth` is what it has to know of the features: how many there are.

    These, and the distances of rows, it gets in units of what divides them all: the compiler is to know.
    """
    x, y = (z if z.stride(1) == 1 else z.contiguous() for z in (tile.x, tile.y))
    aligned = gcd(16, x.shape[1], x.stride(0), y.stride(0))
    programs = ceil(len(x) / blocks.rows) * ceil(len(y) / blocks.cols)
    sets: list[Any] = []
    for of in (tile.positive, tile.excluded):
        named, *ids = or_nothing(tile, of.named, of.rows, of.cols)
        sets += [named, 0 if of.named is None else of.named.stride(0), *ids]
    with _on(x.device):
        kernel[(programs,)](
            x, y, *tensors, *sets,
            tile.first_row, len(x), len(y),
            depth or x.shape[1] // aligned, x.stride(0) // aligned, y.stride(0) // aligned, *numbers,
            POSITIVE=0 if tile.positive.named is None else len(tile.positive.named), POSITIVE_IDS=tile.positive.ids,
            EXCLUDED=0 if tile.excluded.named is None else len(tile.excluded.named), EXCLUDED_IDS=tile.excluded.ids,
            **flags, ALIGNED=aligned, **_settings(x, blocks),
        )  # fmt: skip


def rounded(scale: float, shift: float) -> tuple[tuple[float, float], float, float]:
    """k and c in float32; the scale that k is; what is left of the shift."""
    log2_scale, log2_shift = _single(scale * LOG2_E), _single(shift * LOG2_E)
    return (log2_scale, log2_shift), log2_scale / LOG2_E, exp(log2_shift / LOG2_E - shift)


def _single(x: float) -> float:
    """As float32 has it."""
    return ctypes.c_float(x).value


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current GPU, whose tensors these may not be."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _settings(x: Tensor, blocks: Blocks) -> dict[str, Any]:
    """float32 is multiplied in float32's precision, unless the program has asked for less of all products.

    The interpreter cannot multiply bfloat16.
    """
    single = "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return {
        "BM": blocks.rows,
        "BN": blocks.cols,
        "BK": blocks.depth,
        "GROUP": blocks.group,
        "PRECISION": "ieee" if interpreted() or x.dtype != torch.float32 else single,
        "WIDEN": interpreted(),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": True,  # S scale - shift is rounded once
    }
