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


def vector(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers on a device, each of them filled in there: a copy from the host would wait for a GPU."""
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
