"""Where kernels can run: the device, the installation, and the user's choice.

`kernel="triton"` takes kernels or raises; "torch" never takes them; "auto" takes them on a GPU where they passed their
check and were faster (see `nodes.kernel_check`).
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from .choice import switched_off
from .launch import capability, interpreted

Kernel = Literal["auto", "torch", "triton"]
KERNELS = ("auto", "torch", "triton")
_FIRST = (8, 0)  # compute capability


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Raise ValueError unless the kernel can run on the device."""
    if kernel == "triton" and (why := missing(device)) is not None:
        raise ValueError(f"kernel='triton' {why}; or kernel='torch'")


def missing(device: torch.device) -> str | None:
    """Return what kernels need that is not here, after the words "kernel='triton'"; None if they can run."""
    if importlib.util.find_spec("triton") is None:
        return "needs Triton: pip install triton, on Linux"
    if device.type != "cuda" and not interpreted():
        return (
            f"is for CUDA tensors, got {device.type} (TRITON_INTERPRET=1, set before the program starts, runs kernels "
            "in Triton's interpreter, for tests)"
        )
    if device.type != "cuda" and not _runs_in_interpreter():
        return "needs TRITON_INTERPRET=1 to be set before the program starts, but it was set later"
    if device.type == "cuda" and not _is_new_enough(device):
        return f"is for NVIDIA GPUs of compute capability 8.0 or higher, got {torch.cuda.get_device_name(device)}"
    if (why := switched_off()) is not None:
        return f"is switched off in this process: {why}"
    return None


def chooses(device: torch.device) -> bool:
    """Return whether "auto" chooses between kernels and plain PyTorch on a device, or is plain PyTorch."""
    return device.type == "cuda" and _is_new_enough(device)


def _is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is None and capability(device) >= _FIRST


def _runs_in_interpreter() -> bool:
    """Whether the interpreter was chosen before the kernels were compiled."""
    from .tiles.common import place_of

    return type(place_of).__name__ == "InterpretedFunction"
