"""Engines that would treat the shards of a head as copies of the same parameter."""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_DEEPSPEED = "deepspeed.runtime.engine"


def wrapped_by_ddp(p: Tensor) -> bool:
    """Return whether the caller is in the forward pass of a DistributedDataParallel that reduces this parameter."""
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)  # set during its forward pass
    return active is not None and any(
        x is p and name not in active.parameters_to_ignore for name, x in active.module.named_parameters()
    )


def wrapped_by_deepspeed(p: Tensor) -> bool:
    """Return whether the caller is in the forward pass of a DeepSpeed engine that has this parameter.

    DeepSpeed sets no mark on parameters or modules with every stage of ZeRO, so its frame is looked for.
    """
    if _DEEPSPEED not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and frame.f_globals.get("__name__") == _DEEPSPEED:
            module = getattr(frame.f_locals.get("self"), "module", None)
            return isinstance(module, nn.Module) and any(x is p for x in module.parameters())
        frame = frame.f_back
    return False
