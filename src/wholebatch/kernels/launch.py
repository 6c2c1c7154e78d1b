"""How kernels are started: the programs, the tensors' GPU, and the arguments.

A kernel computes E = 2^(k x . y - c). It reads k and c, two numbers in float32, from memory on the device, so that they
may change from call to call without the host. Where the host knows scale and shift, `exact` rounds them to what float32
holds: E is then exp(S - shift) without a further factor.

Partial sums of a row are added in float64, in the order of the blocks: a call gives the same bits each time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from math import e, gcd, log2
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import Blocks, Form, blocks_of

LOG2_E = log2(e)
_DESCRIPTORS = (9, 0)  # the first compute capability that copies boxes of features by itself
ONE_PASS = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": True}  # options of kernels that memory limits
_ONCE = 2**30  # more than any tile has blocks: a program computes one


@dataclass(eq=False)
class Entries:
    """A set of a tile's entries, in the form that kernels take."""

    # named: (k, C), int32, up to k rows of this rank that each column names; -1: none. None: no column names any
    named: Tensor | None = None
    # ids: 0: no ids; 1: entries with equal ids are added; 2: the set is entries with equal ids, without named ones
    ids: int = 0
    rows: Tensor | None = None  # (R,) ids, int32, not negative, or None
    cols: Tensor | None = None  # (C,) ids, int32, not negative, or None

    @cached_property
    def shape(self) -> tuple[int, int]:
        """The number of rows that a column names, and the stride between them."""
        return (0, 0) if self.named is None else (self.named.shape[0], self.named.stride(0))


@dataclass(eq=False)
class RowTerms:
    """Scales and offsets of rows: S_ij = scale_i scale x_i . y_j + offset_i."""

    scales: Tensor  # (R,), float32
    offsets: Tensor | None  # (R,), float32, or None


@dataclass(eq=False)
class TileInputs:
    """A tile of S: its features, its positives, and its candidates."""

    x: Tensor  # (R, d)
    y: Tensor  # (C, d)
    # numbers: (2,), float32, the scale of S and the shift of its exponentials, or its bias, times log2(e), on the
    # device; see :func:`numbers_of`. None where a kernel reads neither
    numbers: Tensor | None
    positive: Entries  # the positive entries
    excluded: Entries  # the entries that are no candidates, unless they are positive
    candidates: int  # 0: the negatives, 1: negatives and positives, 2: positives alone
    first_row: int  # the tile's first row, among the rows that columns name
    row_terms: RowTerms | None = None  # scales and offsets of rows, or None
    col_scales: Tensor | None = None  # (C,), float32, further factors of S_ij; None: 1. They require `row_terms`
    allows_tf32: bool = False  # whether float32 is multiplied in TF32


class Box(NamedTuple):
    """A tensor that a kernel reads or writes by a tensor descriptor, and the size of a box of it."""

    tensor: Tensor
    size: list[int]


class Layout(NamedTuple):
    """The facts of a launch that follow from its form."""

    blocks: Blocks  # the block of a program
    aligned: int  # a divisor of the number of features, and of strides, in units of which the kernel takes them
    boxes: bool  # whether X and Y are read by tensor descriptors
    programs: int | None  # the most programs at a time; None: one for each block
    constants: dict[str, Any]  # the kernel's constants


def exact(x: float) -> float:
    """Return the number nearest to a scale, shift or bias that kernels can represent: they take it times log2(e).

    >>> abs(exact(25.0) - 25.0) < 1e-6, exact(exact(25.0)) == exact(25.0)
    (True, True)
    """
    return ctypes.c_float(x * LOG2_E).value / LOG2_E


def numbers_of(scale: float | Tensor, other: float | Tensor, device: torch.device) -> Tensor:
    """Return a scale and a shift, or a bias, in the form that kernels read, (2,), float32."""
    if not isinstance(scale, Tensor) and not isinstance(other, Tensor):  # made there: a copy would wait for a GPU
        return torch.linspace(scale * LOG2_E, other * LOG2_E, 2, dtype=torch.float32, device=device)
    numbers = torch.empty(2, dtype=torch.float32, device=device)
    if isinstance(scale, Tensor) and scale.device == device:
        torch.mul(scale, LOG2_E, out=numbers[0])
    else:
        numbers[0].fill_(scale * LOG2_E)
    numbers[1].fill_(other * LOG2_E)
    return numbers


@cache
def tiles(name: str) -> ModuleType:
    """Return a module of kernels, which imports Triton."""
    return import_module(f"{__package__}.tiles.{name}")


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels, on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


verified: list[str] | None = None  # inside of `verify.verifying`: the kernels that passed
latest = {"by pointers": True}  # how the kernel that was started last loads features
memory: Callable[[Tensor, tuple[int, ...], torch.dtype], Tensor] | None = None  # of results, while one is checked


def empty(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return memory for a kernel's results, on the device of a tensor."""
    if memory is not None:
        return memory(like, shape, dtype)
    return like.new_empty(shape, dtype=dtype)


_chosen: list[Blocks] = []  # of all threads: CUDA's backward passes run on a thread of autograd's


@contextmanager
def using(blocks: Blocks) -> Iterator[None]:
    """Use these blocks for all programs of this process inside, to measure which are fast."""
    _chosen.append(blocks)
    try:
        yield
    finally:
        _chosen.pop()


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU."""
    return torch.cuda.get_device_capability(device)


@cache
def processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; a few elsewhere, so that a program computes several blocks."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def layout(kernel: str, tile: TileInputs, *, entries: int = 0, unit: int = 0, document: int = 0) -> Layout:
    """Return the layout of a launch. Its numbers are those of `blocks.Form`."""
    x, positive, excluded, simulated = tile.x, tile.positive, tile.excluded, interpreted()
    form = Form(
        kernel,
        (0, 0) if simulated else capability(x.device),
        x.dtype,
        x.shape[1],
        x.shape[0] >= 32768,
        max(positive.shape[0], excluded.shape[0]),
        bool(positive.ids or excluded.ids),
        entries,
        unit,
        document,
    )
    return _layout(form, processors(x.device), _chosen[-1] if _chosen else None, tile.allows_tf32, simulated)


@cache
def _layout(form: Form, processors: int, chosen: Blocks | None, allows_tf32: bool, simulated: bool) -> Layout:
    """Return the layout of a form of launch.

    float32 is multiplied in float32's precision, unless TF32 is allowed. The interpreter cannot multiply bfloat16.
    """
    boxes = form.boxes if simulated else form.boxes and form.capability >= _DESCRIPTORS
    blocks = chosen or (Blocks(32, 64, 32, 2, 4, 1, 2) if simulated else blocks_of(form, boxes=boxes))
    boxes = boxes and not form.unit % blocks.depth
    precision = "ieee"
    if form.dtype == torch.float32 and not simulated:
        precision = "tf32" if allows_tf32 else "tf32x3"
    programs = None
    if boxes and not form.unit:
        programs = processors * (2 if blocks.warps == 4 else 1)
    aligned = gcd(16, form.features)
    constants = {
        "BM": blocks.rows,
        "BN": blocks.cols,
        "BK": blocks.depth,
        "GROUP": blocks.group,
        "ALIGNED": aligned,
        "PRECISION": precision,
        "WIDEN": simulated,
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
        "enable_fp_fusion": True,  # S scale - shift is rounded once
    }
    if not form.document:
        constants["BOXES"] = boxes
    if not form.document and not form.unit:
        constants["PROGRAMS"] = programs or _ONCE
    return Layout(blocks, aligned, boxes, programs, constants)


def laid_out(x: Tensor) -> Tensor:
    """Return rows as kernels can read them: in order, and each at a multiple of 16 bytes if it has so many.

    So it depends on the number of features alone, the same on all ranks, whether tensor descriptors read them.
    """
    (across, along), dim = x.stride(), x.shape[1]
    aligned = (dim | 16) & -(dim | 16)  # gcd(16, dim), without a call
    if along == 1 and not across % aligned and across >= dim and not x.data_ptr() % 16:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def start(
    kernel: Any,
    tile: TileInputs,
    plan: Layout,
    *arguments: Tensor | Box | None,
    units: int | None = None,
    last: tuple[int, ...] = (),
    **flags: Any,
) -> None:
    """Start a kernel on the blocks of a tile, with tensors, last numbers and constants of its own.

    The argument `units` describes the features; None: their number.
    """
    x, y = laid_out(tile.x), laid_out(tile.y)
    blocks, aligned = plan.blocks, plan.aligned
    num_rows, num_cols = x.shape[0], y.shape[0]
    count = -(-num_rows // blocks.rows) * -(-num_cols // blocks.cols)
    positive, excluded = tile.positive, tile.excluded
    (named, stride), (left_out, stride_left_out) = positive.shape, excluded.shape
    run(
        kernel, count if plan.programs is None else min(count, plan.programs),
        Box(x, [blocks.rows, blocks.depth]) if plan.boxes else x,
        Box(y, [blocks.cols, blocks.depth]) if plan.boxes else y,
        tile.numbers, *arguments,
        positive.named, stride, positive.rows, positive.cols,
        excluded.named, stride_left_out, excluded.rows, excluded.cols,
        tile.first_row, num_rows, num_cols, units or x.shape[1] // aligned,
        x.stride(0) // aligned, y.stride(0) // aligned, *last,
        KINDS=(named, positive.ids, left_out, excluded.ids), **flags, **plan.constants,
    )  # fmt: skip


def run(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run a kernel on its tensors' GPU: the one place from which Triton is called, which tests replace."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    inputs = [TensorDescriptor.from_tensor(*x) if type(x) is Box else x for x in arguments]
    latest["by pointers"] = type(arguments[0]) is not Box
    first = arguments[0] if latest["by pointers"] else arguments[0].tensor
    with torch.cuda.device(first.device) if first.is_cuda else nullcontext():
        kernel[(programs,)](*inputs, **constants)


def box_of(out: Tensor, plan: Layout, parts: int) -> Box | Tensor:
    """Return memory for a tile's entries as a box; as it is where rows do not begin at multiples of 16 bytes."""
    wide = plan.boxes and not out.stride(0) * out.itemsize % 16 and not out.data_ptr() % 16
    return Box(out, [plan.blocks.rows, plan.blocks.cols // parts]) if wide else out
