"""In which precision sums are taken, and numbers in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of tiles, sums and gradients: float32 for half precision, else the tensors' own."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_dtype(device: torch.device) -> torch.dtype:
    """The precision of the few numbers that everything ends in: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def rows_at_a_time(device: torch.device) -> int:
    """Rows that are worked on at a time: few, that stay in a CPU's cache; many, so that a GPU is busy with them."""
    return 256 if device.type == "cpu" else 16384


def vector(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, each of them filled in there: a copy from the host would wait for a GPU."""
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
