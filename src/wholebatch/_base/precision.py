"""The precision in which sums are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .part_sizes import part_size


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of tiles, sums and gradients: float32 for half precision, else the dtype of the tensors."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of statistics and losses: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def tf32_is_allowed() -> bool:
    """Whether the program lets CUDA multiply float32 in TF32, by whichever of torch's settings."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def rows_at_a_time(device: torch.device) -> int:
    """Return the number of rows to process at a time: few, to fit a CPU's cache; many, to keep a GPU busy."""
    return part_size("rows", 256 if device.type == "cpu" else 16384)


def vector(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return numbers on a device, each filled in there: a copy from the host would wait for a GPU."""
    return torch.stack([torch.full((), number, dtype=dtype, device=device) for number in numbers])
