"""GPUs on which kernels of a dtype have been wrong, and do not run before a check on the GPU itself has passed.

float32 is multiplied in three products with one sum. On tensor cores of Blackwell, Triton up to 3.8 lets the products
of a step begin before those of the last step have ended (triton-lang/triton#10821, seen on compute capability 10.3;
linkedin/Liger-Kernel#1435, on 10.0). `blocks` avoids the overlap of steps there, but no card has shown that this is
enough. Half precision takes one product.
"""

from __future__ import annotations

import torch

from .launch import capability

_passed: set[torch.device] = set()


def in_doubt(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether kernels must not take features of this dtype on this device yet."""
    if dtype != torch.float32 or device.type != "cuda" or device in _passed:
        return False
    return capability(device) >= (10, 0)


def passed_check(device: torch.device) -> None:
    """Note that kernels of float32 have given the right results on this device."""
    _passed.add(device)
