"""Who computes a tile: plain PyTorch, or a kernel in Triton."""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from .launch import interpreted

Kernel = Literal["auto", "torch", "triton"]
KERNELS = ("auto", "torch", "triton")


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Raise ValueError unless what is asked for can be had."""
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
            "TRITON_INTERPRET=1 has to be set before the program starts, and was set later; or kernel='torch'"
        )
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0)):
        raise ValueError(
            "kernel='triton' is for NVIDIA GPUs of compute capability 8.0 and more, got "
            f"{torch.cuda.get_device_name(device)}; use kernel='torch'"
        )


def _runs_in_interpreter() -> bool:
    """Whether Triton had been told when kernels were made."""
    from .tile import place

    return type(place).__name__ == "InterpretedFunction"


def in_triton(kernel: Kernel) -> bool:
    """Whether kernels are taken: where they are asked for. "auto" is plain PyTorch until they are measured on a GPU."""
    return kernel == "triton"
