"""Kernels as functions of tensors: how large a program's part is, and where its sums go.

Partial sums of a row are added up in float64, in the order of the blocks: a call gives the same bits each time.

A kernel has E = 2^(k x . y - c) with k and c in float32, which is exp(S' - shift') for a scale and a shift that are as
near to those asked for as float32 comes. Logits of positives are taken with the same scale, and what is left of the
shift, exp(shift' - shift), is multiplied to sums and weights: all that is made of a similarity belongs together.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

_LOG2_E = math.log2(math.e)


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


def blocks_for(dtype: torch.dtype, sets: Sequence[Entries] = (), *, logits: bool = False) -> Blocks:
    """The part of a program: as much of S as registers hold, with no spilling on any architecture.

    Args:
        dtype: of the features; float32 is multiplied in parts, three times, and takes more registers.
        sets: each entry is compared with what is in them, which takes some, too.
        logits: whether these are summed or weigh, beside exponentials and targets.
    """
    if interpreted():
        return Blocks(32, 64, 32, 2, 1, 1)
    if dtype == torch.float32:
        return Blocks(64, 128, 32, 8, 8, 2)
    many = logits or any(of.ids for of in sets) or sum(of.comparisons for of in sets) > 2
    return Blocks(128, 64 if many else 128, 64, 8, 8, 3)


def tile_sums(
    tile: TileOf, *, shift: float, rows: Collection[str], cols: Collection[str], keep: Tensor | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums of a tile of S, none of which is stored.

    Args:
        tile: of S.
        shift: of the exponentials, exp(S - shift).
        rows: what is summed of each row: "sum", of candidates' exponentials, "target", of the logits of positives,
            "logits" and "count", of the candidates'. The first at least, or nothing.
        cols: of each column.
        keep: (R, C), contiguous, for the candidates' exponentials; None: they are not kept.

    Returns:
        By name, (R,) and (C,), float64; a target only where there may be positives.
    """
    from . import softmax_tiles

    blocks, (down, across) = _parts(tile, {*rows, *cols})
    log2, of_logits, of_sums = _rounded(tile.scale, shift)
    if tile.of_rows is not None:
        of_logits = 1 / _LOG2_E
    some = bool(tile.positive.comparisons)
    sides = [[name for name in _SLOTS if name in names and (some or name != "target")] for names in (rows, cols)]
    shapes = ((len(sides[0]), across, len(tile.x)), (len(sides[1]), down, len(tile.y)))
    made = [tile.x.new_empty(shape, dtype=torch.float32) for shape in shapes]
    _start(
        softmax_tiles.tile_sums, tile, blocks, (*made, *_or_nothing(tile, keep), *_scaling(tile, log2)), log2,
        CANDIDATES=tile.candidates, OF_ROWS=_fields(sides[0]), OF_COLS=_fields(sides[1]),
        BY_ROW=tile.of_rows is not None, BY_COL=tile.col_scales is not None, KEEP=keep is not None,
    )  # fmt: skip
    factors = {"sum": of_sums, "target": of_logits, "logits": of_logits, "count": 1.0}
    found = [
        {name: part.sum(0, dtype=torch.float64).mul_(factors[name]) for name, part in zip(names, of_side, strict=True)}
        for names, of_side in zip(sides, made, strict=True)
    ]
    return found[0], found[1]


def tile_gradient(
    tile: TileOf,
    out: Tensor,
    *,
    shift: float,
    rows: Mapping[str, Tensor],
    cols: Mapping[str, Tensor],
    kept: Tensor | None = None,
    totals: bool = False,
) -> Tensor | None:
    """Write dS of a tile to `out`, (R, C), in its dtype; each row times its scale, if rows have scales.

    Args:
        tile: of S.
        out: (R, C), contiguous.
        shift: of the exponentials.
        rows: weights (R,) of a row's "sum", "target" and "logits", as in :func:`tile_sums`; or nothing.
        cols: weights (C,) of a column's.
        kept: (R, C), exponentials that were kept; None: they are computed.
        totals: whether sum_j dS_ij is wanted.

    Returns:
        It, (R,), float64, without the rows' scales; or None.
    """
    from . import softmax_tiles

    if kept is not None and not {"logits"} & {*rows, *cols}:
        tile = replace(tile, excluded=Entries())  # they were kept as 0
    blocks, (_, across) = _parts(tile, {*rows, *cols})
    log2, _, left = _rounded(tile.scale, shift)
    weights = []
    for side, count in ((rows, len(tile.x)), (cols, len(tile.y))):
        of_side = tile.x.new_zeros(3 if side else 0, count, dtype=torch.float32)
        for slot, name in enumerate(_WEIGHTS):
            if name in side:
                of_side[slot] = side[name] * left if name == "sum" else side[name]
        weights.append(of_side)
    summed = tile.x.new_empty(across * totals, len(tile.x), dtype=torch.float32)
    _start(
        softmax_tiles.tile_gradient, tile, blocks,
        (out, summed, *weights, *_or_nothing(tile, kept), *_scaling(tile, log2)), log2,
        CANDIDATES=tile.candidates, OF_ROWS=_fields(rows), OF_COLS=_fields(cols),
        BY_ROW=tile.of_rows is not None, BY_COL=tile.col_scales is not None, KEPT=kept is not None, TOTALS=totals,
    )  # fmt: skip
    return summed.sum(0, dtype=torch.float64) if totals else None


def tile_sigmoid(
    tile: TileOf, out: Tensor | None, *, bias: float, weights: Tensor | None, totals: bool
) -> tuple[Tensor, Tensor | None]:
    """Losses of a tile's rows, where each entry is a classification of its own; dS is written to `out`, if given.

    Args:
        tile: of S, without its bias.
        out: (R, C), contiguous.
        bias: added to S.
        weights: (R,), of rows, in dS; None: 1.
        totals: whether sum_j dS_ij is wanted.

    Returns:
        sum_j l_ij, and sum_j dS_ij or None; (R,), float64.
    """
    from . import sigmoid_tiles

    blocks, (_, across) = _parts(tile)
    losses, summed = (tile.x.new_empty(across * wanted, len(tile.x), dtype=torch.float32) for wanted in (1, totals))
    given = [*_or_nothing(tile, out), *_or_nothing(tile, None if weights is None else weights.float().contiguous())]
    _start(
        sigmoid_tiles.tile_sigmoid, tile, blocks, (losses, summed, *given), _rounded(tile.scale, bias)[0],
        WEIGHTED=weights is not None, GRADIENT=out is not None, TOTALS=totals,
    )  # fmt: skip
    return losses.sum(0, dtype=torch.float64), summed.sum(0, dtype=torch.float64) if totals else None


_SLOTS = ("sum", "target", "logits", "count")  # of sums
_WEIGHTS = ("sum", "target", "logits")
_BITS = {"sum": 1, "target": 2, "logits": 4}  # as `softmax_tiles` has them


def _fields(names: Collection[str]) -> int:
    return sum(bit for name, bit in _BITS.items() if name in names)


def _parts(tile: TileOf, names: Collection[str] = ()) -> tuple[Blocks, tuple[int, int]]:
    """What a program does, and how many there are, down and across."""
    blocks = blocks_for(tile.x.dtype, (tile.positive, tile.excluded), logits="logits" in names)
    return blocks, (math.ceil(len(tile.x) / blocks.rows), math.ceil(len(tile.y) / blocks.cols))


def _or_nothing(tile: TileOf, *given: Tensor | None) -> list[Tensor]:
    """What stands for a tensor that there is none of is not read."""
    return [tile.x if x is None else x for x in given]


def _scaling(tile: TileOf, log2: tuple[float, float]) -> list[Tensor]:
    """Each row's scale, and its shift in units of log(2); each column's scale."""
    of = tile.of_rows
    if of is None:
        return _or_nothing(tile, None, None, None)
    shifts = torch.full_like(of.scales, log2[1])
    if of.offsets is not None:
        shifts.sub_(of.offsets, alpha=_LOG2_E)
    return [of.scales, shifts, *_or_nothing(tile, tile.col_scales)]


def _start(
    kernel: Any, tile: TileOf, blocks: Blocks, tensors: Sequence[Tensor], log2: tuple[float, float], **flags: Any
) -> None:
    """One program for each part of the tile."""
    x, y = (z if z.stride(1) == 1 else z.contiguous() for z in (tile.x, tile.y))
    programs = math.ceil(len(x) / blocks.rows) * math.ceil(len(y) / blocks.cols)
    sets: list[Any] = []
    for of in (tile.positive, tile.excluded):
        named, *ids = _or_nothing(tile, of.named, of.rows, of.cols)
        sets += [named, 0 if of.named is None else of.named.stride(0), *ids]
    with _on(x.device):
        kernel[(programs,)](
            x, y, *tensors, *sets,
            tile.first_row, len(x), len(y), x.shape[1], x.stride(0), y.stride(0), *log2,
            POSITIVE=0 if tile.positive.named is None else len(tile.positive.named), POSITIVE_IDS=tile.positive.ids,
            EXCLUDED=0 if tile.excluded.named is None else len(tile.excluded.named), EXCLUDED_IDS=tile.excluded.ids,
            **flags, **_settings(x, blocks),
        )  # fmt: skip


def _rounded(scale: float, shift: float) -> tuple[tuple[float, float], float, float]:
    """k and c in float32; the scale that k is; what is left of the shift."""
    log2_scale, log2_shift = _single(scale * _LOG2_E), _single(shift * _LOG2_E)
    return (log2_scale, log2_shift), log2_scale / _LOG2_E, math.exp(log2_shift / _LOG2_E - shift)


def _single(x: float) -> float:
    """As float32 has it."""
    return ctypes.c_float(x).value


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton starts kernels on the current GPU, whose tensors these may not be."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _settings(x: Tensor, blocks: Blocks) -> dict[str, Any]:
    """float32 is multiplied in float32's precision; the interpreter cannot multiply bfloat16."""
    return {
        "BM": blocks.rows,
        "BN": blocks.cols,
        "BK": blocks.depth,
        "GROUP": blocks.group,
        "PRECISION": "ieee" if interpreted() or x.dtype != torch.float32 else "tf32x3",
        "WIDEN": interpreted(),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": True,  # S scale - shift is rounded once
    }
