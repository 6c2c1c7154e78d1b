"""How kernels are started: the programs, the tensors' GPU, and the arguments.

A kernel computes E = 2^(k x . y - c) with k and c in float32, which is exp(S' - shift') for the scale and the shift
that float32 can represent closest to the given ones. Logits of positives use the same scale, and sums and weights are
multiplied by the remaining factor exp(shift' - shift), so that all results of a similarity are consistent.

Partial sums of a row are added in float64, in the order of the blocks: a call gives the same bits each time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil, e, exp, gcd, log2
from typing import Any

import torch
from torch import Tensor

from .blocks import Blocks, Form, blocks_of

LOG2_E = log2(e)


@dataclass(frozen=True)
class Entries:
    """A set of a tile's entries, in the form that kernels take.

    Args:
        named: (k, C), int32, up to k rows of this rank that each column names; -1: none. None: no column names any.
        ids: 0: no ids; 1: entries with equal ids are added; 2: the set is entries with equal ids, without named ones.
        rows: (R,) ids, int32, or None.
        cols: (C,) ids, int32, or None.
    """

    named: Tensor | None = None
    ids: int = 0
    rows: Tensor | None = None
    cols: Tensor | None = None

    @property
    def comparisons(self) -> int:
        """The number of comparisons for each entry."""
        return (0 if self.named is None else len(self.named)) + bool(self.ids)


@dataclass(frozen=True)
class RowTerms:
    """Scales and offsets of rows: S_ij = scale_i scale x_i . y_j + offset_i.

    Args:
        scales: (R,), float32.
        offsets: (R,), or None.
    """

    scales: Tensor
    offsets: Tensor | None


@dataclass(frozen=True)
class TileInputs:
    """A tile of S: its features, its positives, and its candidates.

    Args:
        x: (R, d).
        y: (C, d).
        scale: the scale of S.
        positive: the positive entries.
        excluded: the entries that are no candidates, unless they are positive.
        candidates: 0: the negatives, 1: negatives and positives, 2: positives alone.
        first_row: the tile's first row, among the rows that columns name.
        row_terms: scales and offsets of rows, or None.
        col_scales: (C,), float32, further factors of S_ij; None: 1. They require `row_terms`.
        allows_tf32: whether float32 is multiplied in TF32.
    """

    x: Tensor
    y: Tensor
    scale: float
    positive: Entries
    excluded: Entries
    candidates: int
    first_row: int
    row_terms: RowTerms | None = None
    col_scales: Tensor | None = None
    allows_tf32: bool = False


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


verified: list[str] | None = None  # inside of `verify.verifying`: the kernels that passed
memory: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor] | None = None  # of results, while one is checked


def empty(like: Tensor, *shape: int) -> Tensor:
    """Return memory for a kernel's results, float32, on the device of a tensor."""
    if memory is not None:
        return memory(like, shape, torch.float32)
    return like.new_empty(shape, dtype=torch.float32)


_chosen: list[Blocks] = []  # of all threads: CUDA's backward passes run on a thread of autograd's


@contextmanager
def using(blocks: Blocks) -> Iterator[None]:
    """Use these blocks for all programs of this process inside, to measure which are fast."""
    _chosen.append(blocks)
    try:
        yield
    finally:
        _chosen.pop()


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


def program_grid(
    tile: TileInputs,
    *,
    lean: bool = False,
    one_side: bool = False,
    more_per_entry: bool = False,
    parts: bool = False,
    two_totals: bool = False,
    single_loads: bool = False,
    no_product: bool = False,
    document: int = 0,
) -> tuple[Blocks, tuple[int, int]]:
    """Choose a program's block, and count the programs, down and across.

    Args:
        tile: the tile of S.
        lean: whether only the exponential of an entry is computed, and it is not kept.
        one_side: whether positives are summed up for one side alone.
        more_per_entry: whether more than the exponential of an entry is computed.
        parts: whether products of several parts of the features are summed up.
        two_totals: whether two numbers are summed for each entry.
        single_loads: whether features have to be loaded one by one.
        no_product: whether exponentials are read instead of computed.
        document: the tokens of the longest document, of whose products there are maxima; 0: there are none.
    """
    if _chosen:
        blocks = _chosen[-1]
    elif interpreted():
        blocks = Blocks(32, 64, 32, 2, 1, 1)
    else:
        sets = (tile.positive, tile.excluded)
        blocks = blocks_of(
            Form(
                capability(tile.x.device),
                single=tile.x.dtype == torch.float32,
                features=tile.x.shape[1],
                columns=len(tile.y),
                compared=sum(of.comparisons for of in sets),
                ids=any(of.ids for of in sets),
                lean=lean,
                one_side=one_side,
                more=more_per_entry,
                parts=parts,
                two_totals=two_totals,
                single_loads=single_loads,
                no_product=no_product,
                document=document,
            )
        )
    return blocks, (ceil(len(tile.x) / blocks.rows), ceil(len(tile.y) / blocks.cols))


def or_unread(tile: TileInputs, *given: Tensor | None) -> list[Tensor]:
    """Replace None by a tensor that the kernel does not read."""
    return [tile.x if x is None else x for x in given]


def start(
    kernel: Any,
    tile: TileInputs,
    blocks: Blocks,
    tensors: Sequence[Tensor],
    numbers: Sequence[float],
    *,
    depth: int | None = None,
    **flags: Any,
) -> None:
    """Start a kernel with one program for each block of the tile.

    Args:
        kernel: a kernel of :mod:`wholebatch.kernels.tiles`.
        tile: the tile of S.
        blocks: the block of a program.
        tensors: the kernel's own tensors.
        numbers: the kernel's own numbers.
        depth: the argument that describes the features; None: their number.
        flags: the kernel's own constants.
    """
    x, y, aligned = _aligned(tile)
    programs = ceil(len(x) / blocks.rows) * ceil(len(y) / blocks.cols)
    sets: list[Any] = []
    for of in (tile.positive, tile.excluded):
        named, *ids = or_unread(tile, of.named, of.rows, of.cols)
        sets += [named, 0 if of.named is None else of.named.stride(0), *ids]
    with on(x.device):
        run(
            kernel, programs,
            x, y, *tensors, *sets,
            tile.first_row, len(x), len(y),
            depth or x.shape[1] // aligned, x.stride(0) // aligned, y.stride(0) // aligned, *numbers,
            POSITIVE=0 if tile.positive.named is None else len(tile.positive.named), POSITIVE_IDS=tile.positive.ids,
            EXCLUDED=0 if tile.excluded.named is None else len(tile.excluded.named), EXCLUDED_IDS=tile.excluded.ids,
            **flags, ALIGNED=aligned, **_settings(tile, blocks),
        )  # fmt: skip


def start_on_documents(
    kernel: Any, tile: TileInputs, blocks: Blocks, documents: int, tensors: Sequence[Tensor], **flags: Any
) -> None:
    """Start a kernel with one program for each block of query tokens and each document.

    Args:
        kernel: a kernel of :mod:`wholebatch.kernels.tiles`.
        tile: tokens of queries, and of documents.
        blocks: the block of a program.
        documents: their number.
        tensors: the kernel's own tensors.
        flags: the kernel's own constants.
    """
    x, y, aligned = _aligned(tile)
    programs = ceil(len(x) / blocks.rows) * documents
    with on(x.device):
        run(
            kernel, programs, x, y, *tensors,
            len(x), documents, x.shape[1] // aligned, x.stride(0) // aligned, y.stride(0) // aligned,
            **flags, ALIGNED=aligned, **_settings(tile, blocks),
        )  # fmt: skip


def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel: the one place from which Triton is called, which tests replace."""
    kernel[(programs,)](*arguments, **constants)


def rounded(scale: float, shift: float) -> tuple[tuple[float, float], float, float]:
    """Return (k, c) in float32, the scale that k stands for, and the remaining factor of the shift."""
    log2_scale, log2_shift = _single(scale * LOG2_E), _single(shift * LOG2_E)
    return (log2_scale, log2_shift), log2_scale / LOG2_E, exp(log2_shift / LOG2_E - shift)


def _single(x: float) -> float:
    """Round to float32."""
    return ctypes.c_float(x).value


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Make the tensors' GPU the current one, on which Triton starts kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _aligned(tile: TileInputs) -> tuple[Tensor, Tensor, int]:
    """Return the features, and a divisor of their number and of the strides: all are passed in units of it.

    So the compiler knows how many features one load may take. It is the same on all ranks, whatever their strides.
    """
    aligned = gcd(16, tile.x.shape[1])
    x, y = (z if z.stride(1) == 1 and not z.stride(0) % aligned else z.contiguous() for z in (tile.x, tile.y))
    return x, y, aligned


def _settings(tile: TileInputs, blocks: Blocks) -> dict[str, Any]:
    """Return the constants of a kernel that follow from the features' dtype and the block.

    float32 is multiplied in float32's precision, unless TF32 is allowed. The interpreter cannot multiply bfloat16.
    """
    precision = "ieee"
    if tile.x.dtype == torch.float32 and not interpreted():
        precision = "tf32" if tile.allows_tf32 else "tf32x3"
    return {
        "BM": blocks.rows,
        "BN": blocks.cols,
        "BK": blocks.depth,
        "GROUP": blocks.group,
        "PRECISION": precision,
        "WIDEN": interpreted(),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": True,  # S scale - shift is rounded once
    }
