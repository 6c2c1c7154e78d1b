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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
        diagonals: how many, two at most.
        ids: 0: there are none; 1: entries with equal ids, too; 2: these, but for those on diagonals.
        arguments: ids (R,) and (C,), int32, and each diagonal's first row, first column and length.
    """

    diagonals: int
    ids: int
    arguments: Sequence[Any]

    @property
    def comparisons(self) -> int:
        """Of each entry."""
        return self.diagonals + bool(self.ids)


@dataclass(frozen=True)
class TileSums:
    """Sums of a tile's rows (R,) and columns (C,), in float64; None where they were not asked for.

    Args:
        rows, cols: of the candidates' exponentials.
        row_targets, col_targets: of the positives' logits.
    """

    rows: Tensor | None
    cols: Tensor | None
    row_targets: Tensor | None
    col_targets: Tensor | None


def interpreted() -> bool:
    """Whether Triton's interpreter runs kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def blocks_for(dtype: torch.dtype, comparisons: int) -> Blocks:
    """The part of a program: as much of S as registers hold, with no spilling on any architecture.

    Args:
        dtype: of the features; float32 is multiplied in parts, three times, and takes more registers.
        comparisons: of each entry, with diagonals and ids; they take some, too.
    """
    if interpreted():
        return Blocks(32, 64, 32, 2, 1, 1)
    if dtype == torch.float32:
        return Blocks(64, 128, 32, 8, 8, 2)
    return Blocks(128, 128 if comparisons <= 2 else 64, 64, 8, 8, 3)


def tile_sums(
    x: Tensor,
    y: Tensor,
    *,
    scale: float,
    shift: float,
    positive: Entries,
    excluded: Entries,
    candidates: int,
    rows: bool,
    cols: bool,
    row_targets: bool,
    col_targets: bool,
) -> TileSums:
    """Sums of a tile of S = scale X Y^T, none of which is stored.

    Args:
        x: (R, d).
        y: (C, d).
        scale: of S.
        shift: of the exponentials, exp(S - shift).
        positive: the entries that are.
        excluded: those that are no candidates, unless they are positive.
        candidates: 0: the negatives, 1: these and positives, 2: positives alone.
        rows: whether their exponentials are summed.
        cols: whether theirs are.
        row_targets: whether the logits of a row's positives are, if there are any.
        col_targets: whether those of a column's are.
    """
    from . import softmax_tiles

    blocks = blocks_for(x.dtype, positive.comparisons + excluded.comparisons)
    some = bool(positive.diagonals or positive.ids)
    row_targets, col_targets = row_targets and some, col_targets and some
    down, across = math.ceil(len(x) / blocks.rows), math.ceil(len(y) / blocks.cols)

    def partial(wanted: bool, *shape: int) -> Tensor:
        return x.new_empty(shape if wanted else (0,), dtype=torch.float32)

    of_rows, of_cols = partial(rows, across, len(x)), partial(cols, down, len(y))
    target_rows, target_cols = partial(row_targets, across, len(x)), partial(col_targets, down, len(y))
    log2, of_targets, of_sums = _rounded(scale, shift)
    _start(
        softmax_tiles.tile_sums, blocks, x, y, (of_rows, of_cols, target_rows, target_cols), positive, excluded,
        candidates, log2, (rows, cols, row_targets, col_targets),
    )  # fmt: skip
    wanted = (
        (rows, of_rows, of_sums),
        (cols, of_cols, of_sums),
        (row_targets, target_rows, of_targets),
        (col_targets, target_cols, of_targets),
    )
    return TileSums(*(part.sum(0, dtype=torch.float64).mul_(by) if want else None for want, part, by in wanted))


def tile_gradient(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    *,
    scale: float,
    shift: float,
    positive: Entries,
    excluded: Entries,
    candidates: int,
    row_weights: Tensor | None,
    col_weights: Tensor | None,
    row_targets: Tensor | None,
    col_targets: Tensor | None,
) -> None:
    """Write dS of a tile to `out`, (R, C), in its dtype.

    Args:
        x: (R, d).
        y: (C, d).
        out: (R, C), contiguous.
        scale: of S.
        shift: of the exponentials.
        positive: as in :func:`tile_sums`.
        excluded: as there.
        candidates: as there.
        row_weights: (R,), of a row's exponentials; None: 0.
        col_weights: (C,), of a column's.
        row_targets: (R,), of a row's positives.
        col_targets: (C,), of a column's.
    """
    from . import softmax_tiles

    blocks = blocks_for(x.dtype, positive.comparisons + excluded.comparisons)
    nothing = x.new_empty(0, dtype=torch.float32)
    log2, _, left = _rounded(scale, shift)
    weights = [None if of is None else of.mul(left).float().contiguous() for of in (row_weights, col_weights)]
    targets = [None if of is None else of.float().contiguous() for of in (row_targets, col_targets)]
    given = (*weights, *targets)
    _start(
        softmax_tiles.tile_gradient, blocks, x, y, (out, *(nothing if of is None else of for of in given)), positive,
        excluded, candidates, log2, tuple(of is not None for of in given),
    )  # fmt: skip


def _start(
    kernel: Any,
    blocks: Blocks,
    x: Tensor,
    y: Tensor,
    tensors: tuple[Tensor, ...],
    positive: Entries,
    excluded: Entries,
    candidates: int,
    log2: tuple[float, float],
    sides: tuple[bool, ...],
) -> None:
    """One program for each part of the tile; `sides` says which numbers there are, as in :func:`tile_gradient`."""
    of_rows, of_cols, targets_of_rows, targets_of_cols = sides
    programs = math.ceil(len(x) / blocks.rows) * math.ceil(len(y) / blocks.cols)
    with _on(x.device):
        kernel[(programs,)](
            x, y, *tensors, *positive.arguments, *excluded.arguments,
            len(x), len(y), x.shape[1], x.stride(0), y.stride(0), *log2,
            POSITIVE_DIAGONALS=positive.diagonals, POSITIVE_IDS=positive.ids,
            EXCLUDED_DIAGONALS=excluded.diagonals, EXCLUDED_IDS=excluded.ids, CANDIDATES=candidates,
            OF_ROWS=of_rows, OF_COLS=of_cols, TARGETS_OF_ROWS=targets_of_rows, TARGETS_OF_COLS=targets_of_cols,
            **_settings(x, blocks),
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
