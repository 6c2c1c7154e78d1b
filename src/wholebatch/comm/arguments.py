"""Checks of a rank's arguments to collectives, one function each; an error shows expected, got and the fix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.checks import check_choice, check_dense, check_sequence, shown
from ..partition import Partition

SUMS = ("sum", "avg")
_NUMBERS = (
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
OPS = (*SUMS, "max", "min", "prod")


def check_tensor(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")
    check_dense(name, x)


def checked_dim(x: Tensor, dim: int) -> int:
    """Return `dim`, counted from the front."""
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, its rows; got a 0-dimensional tensor")
    if not isinstance(dim, int) or isinstance(dim, bool) or not -x.dim() <= dim < x.dim():
        described = f"x of shape {tuple(x.shape)}"
        raise ValueError(f"dim must be from {-x.dim()} to {x.dim() - 1} for {described}; got {shown(dim)}")
    return dim % x.dim()


def without(shape: torch.Size, dim: int) -> list[int]:
    return [*shape[:dim], *shape[dim + 1 :]]


def checked_counts(
    counts: Sequence[int], size: int, rows: int | None, x: Tensor, name: str = "counts", rank: int | None = None
) -> None:
    """Check one count per rank, none negative, which fit x's rows: all of them, or those of `rank`."""
    values = check_sequence(name, counts, "numbers of rows, one for each rank")
    if len(values) != size or any(not isinstance(n, int) or isinstance(n, bool) or n < 0 for n in values):
        raise ValueError(f"{name} must have one entry per rank, {size}, integers, none negative; got {shown(counts)}")
    expected = sum(counts) if rank is None else counts[rank]
    if rows is not None and rows != expected:
        raise ValueError(f"{name} {shown(list(counts))} ask for {shown(expected)} rows, x has shape {tuple(x.shape)}")


def parts(counts: Sequence[int] | None, size: int, x: Tensor, dim: int, name: str = "counts") -> Sequence[int]:
    """Return how many of x's entries along `dim` go to each rank; by default as evenly as possible."""
    if counts is None:
        return Partition.even(x.shape[dim], size).counts
    checked_counts(counts, size, x.shape[dim], x, name)
    return counts


def checked_op(op: str, x: Tensor, ops: tuple[str, ...]) -> str:
    """Return `op`, which exists and is defined for x's dtype."""
    check_choice("op", op, ops)
    if x.dtype == torch.bool:
        raise ValueError("booleans have no sums; cast x to an integer dtype")
    if x.dtype not in _NUMBERS:
        raise ValueError(f"{x.dtype} has no sums here; cast x, for example to torch.float32 or torch.int64")
    if op == "avg" and not (x.is_floating_point() or x.is_complex()):
        raise ValueError(f"op='avg' of {x.dtype} would not be an integer; cast x, or use op='sum'")
    if op not in SUMS and x.is_complex():
        raise ValueError(f"op={op!r} is not offered for complex numbers, got {x.dtype}")
    return op
