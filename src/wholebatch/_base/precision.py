"""The precision in which sums are computed, and inner products of rows in it, some rows at a time.

So neither factor of a product has a widened copy. The planner counts a step of few rows, in which parts are smaller
still, so that they are as many kinds of memory as in a large step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

_SMALLER: ContextVar[Mapping[str, int] | None] = ContextVar("smaller parts", default=None)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of tiles, sums and gradients: float32 for half precision, else the dtype of the tensors."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of statistics and losses: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def tf32_is_allowed() -> bool:
    """Whether the program lets CUDA multiply float32 in TF32, by whichever of torch's settings."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def vector(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device, each filled in there: a copy from the host would wait for a GPU."""
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])


def part_size(name: str, usual: int) -> int:
    """Return the size of a part: the usual one, or inside `smaller_parts` another."""
    smaller = _SMALLER.get()
    return usual if smaller is None else smaller.get(name, usual)


@contextmanager
def smaller_parts(sizes: Mapping[str, int]) -> Iterator[None]:
    """Replace the sizes of parts, by their names, inside."""
    token = _SMALLER.set(sizes)
    try:
        yield
    finally:
        _SMALLER.reset(token)


def rows_at_a_time(device: torch.device) -> int:
    """Return the number of rows to process at a time: few, to fit a CPU's cache; many, to keep a GPU busy."""
    return part_size("rows", 256 if device.type == "cpu" else 16384)


def rows_widened(width: int, device: torch.device) -> int:
    """Return how many rows are widened at a time, by `inner` and where angles are computed.

    Each takes memory three to five times, in float64; a few short rows at a time would take time to start.
    """
    return max(rows_at_a_time(device) // 8, part_size("numbers", 2**16) // max(width, 1))


def inner(a: Tensor, b: Tensor | None, divided_by: Tensor | None = None) -> Tensor:
    """Return <a, b>, shape (), with the rows of a divided by `divided_by`, (rows, 1), if given.

    The sum is in float64, because the gradient of a learnable scale is a small difference of large numbers. A few rows
    at a time are widened.
    """
    assert b is not None, "a learnable scale always comes with U or V; please report this"
    total = torch.zeros((), dtype=wide_dtype(b.device), device=b.device)
    rows = rows_widened(b.shape[1], b.device)
    for start in range(0, len(b), rows):
        some = slice(start, start + rows)
        products = torch.linalg.vecdot(a[some].to(total.dtype), b[some].to(total.dtype))
        total += (products if divided_by is None else products / divided_by[some, 0]).sum(dtype=total.dtype)
    return total


def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """Return x_i . y_i of each row in the accumulation dtype, (rows,), without a gradient, a few rows at a time."""
    x, y, dtype, most = x.detach(), y.detach(), accumulation_dtype(x.dtype), rows_at_a_time(x.device)
    if x.shape[0] <= most:
        return torch.linalg.vecdot(x.to(dtype), y.to(dtype))
    parts = zip(x.split(most), y.split(most), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(dtype), b.to(dtype)) for a, b in parts])
