"""The choice between plain PyTorch and Triton kernels for a tile."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from .launch import interpreted

Kernel = Literal["auto", "torch", "triton"]
KERNELS = ("auto", "torch", "triton")


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Raise ValueError unless the kernel can run on the device."""
    if kernel != "triton":
        return
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernel='triton' needs Triton: pip install 'wholebatch[triton]', on Linux; or kernel='torch'")
    if device.type != "cuda" and not interpreted():
        raise ValueError(
            f"kernel='triton' is for CUDA tensors, got {device.type} (TRITON_INTERPRET=1, set before the program "
            "starts, runs kernels in Triton's interpreter, for tests); or kernel='torch'"
        )
    if device.type != "cuda" and not _runs_in_interpreter():
        raise ValueError(
            "TRITON_INTERPRET=1 must be set before the program starts, but was set later; or kernel='torch'"
        )
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ValueError(
            "kernel='triton' is for NVIDIA GPUs of compute capability 8.0 or higher, got "
            f"{torch.cuda.get_device_name(device)}; use kernel='torch'"
        )


def _runs_in_interpreter() -> bool:
    """Whether the interpreter was chosen before the kernels were compiled."""
    from .tiles.common import place

    return type(place).__name__ == "InterpretedFunction"


def in_triton(kernel: Kernel) -> bool:
    """Whether Triton computes the tiles that it supports: for "triton". "auto" is PyTorch until measured on a GPU."""
    return kernel == "triton"
