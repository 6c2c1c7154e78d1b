"""Whether a head's tensors are the local part of the classes: engines that take them for copies, and state_dicts.

The classes of a state_dict are recorded beside the tensors, and compared before anything is loaded. A state_dict of one
rank's part is loaded by a rank with the same classes. One of all classes, such as a head on one process has, is loaded
by any rank, which takes the rows of its classes.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
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


ROWS = ("weight", "bias")  # the tensors with a row for each class


def record_classes(head: Any, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
    """Record the classes in a state_dict's metadata, beside its tensors; torch.save keeps them."""
    metadata["classes"] = [head.local_classes.start, head.local_classes.stop, head.num_classes]


def check_classes(head: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_others: Any) -> None:
    """Take the local rows of a state_dict of all classes; raise ValueError for one of other classes.

    A state_dict of another rank with the same number of classes is loaded; the next use of the head then raises, on all
    ranks.
    """
    weight, local = state.get(prefix + "weight"), head.local_classes
    if not isinstance(weight, Tensor) or not weight.dim():
        return
    first, stop, count = metadata.get("classes", (None, None, head.num_classes))
    if count == head.num_classes == len(weight) and first in (None, 0):
        for name in ROWS:
            if isinstance(x := state.get(prefix + name), Tensor):
                state[prefix + name] = x[local.start : local.stop]
        if prefix + "first_class" in state:
            state[prefix + "first_class"] = torch.tensor(local.start, device="cpu")
        return
    if len(weight) == local.stop - local.start and count == head.num_classes:
        return
    content = f"{len(weight)} classes" if first is None else f"classes {first} to {stop} of {count}"
    raise ValueError(
        f"a state_dict holds one rank's part of a head; the one for {prefix + 'weight'!r} has {content}, and this rank "
        f"has classes {local.start} to {local.stop} of {head.num_classes}. wholebatch.heads.save_head and load_head "
        "write and read all parts, on any number of ranks"
    )
