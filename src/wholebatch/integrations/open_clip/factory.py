"""open_clip's factories, `create_loss` and `create_task`, with this library's losses in their results.

Their factory reads the options and makes its loss. The loss of the same name here gets the settings of that instance.
So their options decide which loss it is, and their defaults hold.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from ..._base.third_party import declare_torchvision_operators
from ..._base.user_error import UserError
from ..._base.warnings import warn
from .._framework import Framework
from .losses import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss

OPEN_CLIP = Framework("open_clip", ("3.3.0", "4.2.0.dev0"), "pip install 'open_clip_torch[training]>=3.3'")

_log = logging.getLogger("wholebatch")


def create_loss(args: Any) -> nn.Module:  # Any: their namespace of options
    """Return the loss that `open_clip.create_loss(args)` chooses, over the whole batch.

    Under `--accum-freq` the gradient of scale and bias counts once, not in each micro-step.

    Raises:
        ImportError: if open_clip is missing or too old.
        ValueError: for `--horovod`, and if the chosen loss has no counterpart here.
    """
    refuse(args)
    return replaced(_find("create_loss")(args), args)


def create_task(args: Any, *positional: Any, **keywords: Any) -> nn.Module:  # Any: their options and models
    """Return the task that `open_clip.create_task(...)` of open_clip 4 makes, with its loss over the whole batch.

    Raises:
        ImportError: if open_clip is missing, too old, or has no tasks.
        ValueError: for `--horovod`, and if the task's loss has no counterpart here, such as GenLIP's.
    """
    refuse(args)
    task: nn.Module = _find("create_task")(args, *positional, **keywords)
    task.loss = replaced(getattr(task, "loss", None), args)
    return task


def load(name: str) -> ModuleType:
    """Import one of open_clip's modules, also on CPU builds of torch, where its torchvision does not load by itself."""
    with suppress(ImportError):  # without torchvision, open_clip's own error says more
        declare_torchvision_operators()
    return OPEN_CLIP.load(name)


def _find(name: str) -> Any:
    module = load("open_clip")
    return getattr(module, OPEN_CLIP.seam(module, name))


def refuse(args: Any) -> None:  # Any: their namespace of options
    """Raise ValueError for options that contradict this library."""
    if getattr(args, "horovod", False):
        raise UserError(
            "--horovod has no counterpart: losses exchange features by torch.distributed; leave the option out, and "
            "start with torchrun"
        )


def replaced(theirs: nn.Module | None, args: Any) -> nn.Module:  # Any: their namespace of options
    """Return the loss of this library with the settings of one of open_clip's.

    Raises:
        ValueError: if there is no loss with its name.
    """
    name = type(theirs).__name__
    if theirs is None or name not in _COUNTERPARTS:
        found = "a loss inside the model" if theirs is None else name
        raise UserError(
            f"open_clip's configuration has {found} and none of {', '.join(_COUNTERPARTS)}, so there is no loss to "
            "replace; start it with python -m open_clip_train.main"
        )
    ours = _COUNTERPARTS[name](theirs)
    unknown = inspect.signature(theirs.forward).parameters.keys() - inspect.signature(ours.forward).parameters.keys()
    if unknown:
        warn(
            f"open_clip's {name} takes {', '.join(sorted(unknown))}, which its counterpart here does not know; the "
            f"adapter was tested with open_clip {OPEN_CLIP.tested}"
        )
    steps = getattr(args, "accum_freq", 1)
    _explain(args, name, steps)
    return ours if steps == 1 else InMicroSteps(ours, steps)


def _ranks(theirs: Any) -> dict[str, Any]:
    return {"rank": theirs.rank, "world_size": theirs.world_size}


_COUNTERPARTS: dict[str, Callable[[Any], nn.Module]] = {
    "ClipLoss": lambda theirs: ClipLoss(**_ranks(theirs)),
    "SigLipLoss": lambda theirs: SigLipLoss(**_ranks(theirs)),
    "CoCaLoss": lambda theirs: CoCaLoss(
        theirs.caption_loss_weight, theirs.clip_loss_weight, theirs.caption_loss.ignore_index, **_ranks(theirs)
    ),
    "DistillClipLoss": lambda theirs: DistillClipLoss(**_ranks(theirs)),
}


class InMicroSteps(nn.Module):
    """A loss for open_clip's accumulation, which computes the loss of the whole batch in each of A micro-steps.

    A micro-step's features get their gradient in that micro-step only. Scale and bias get theirs in all of them, so
    each gives a part of 1/A.
    """

    def __init__(self, loss: nn.Module, steps: int) -> None:
        super().__init__()
        self.loss, self.steps = loss, steps

    def forward(self, **inputs: Any) -> Any:
        for name in ("logit_scale", "logit_bias"):
            if isinstance(inputs.get(name), Tensor):
                constant = inputs[name].detach()
                inputs[name] = constant + (inputs[name] - constant) / self.steps  # the same value
        return self.loss(**inputs)


def _explain(args: Any, name: str, steps: int) -> None:
    """Log on rank 0 what differs from open_clip's own run."""
    if getattr(args, "rank", 0) != 0:
        return
    _log.info(f"wholebatch computes {name} over the whole batch, with its exact gradient.")
    flags = ("local_loss", "gather_with_grad", "loss_dist_impl")
    needless = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(args, flag, None)]
    if needless:
        _log.info(f"{' and '.join(needless)}: no longer needed, and without effect.")
    if steps > 1:
        _log.info(
            f"--accum-freq {steps}: the gradients of scale and bias count once; open_clip alone multiplies them by "
            f"{steps}. With --wholebatch-chunk-size instead, the loss is computed once."
        )
