"""Accumulation in Trainers of transformers before 5.10: both they and accelerate divide by the number of micro-steps.

A Trainer that trains a loss of this library divides it once; with other losses it stays as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ._framework import TRANSFORMERS, Replacements, Switch
from ._options import AdaptedLoss

_FIRST_THAT_DIVIDES_ONCE = "5.10"


def keep_accelerate_from_dividing() -> None:
    """Let accelerate divide no loss by the number of micro-steps, until another Trainer is made.

    Without effect for releases of transformers in which it does not.
    """
    if _both_divide():
        TRANSFORMERS.find("accelerate.state", "GradientState")().plugin_kwargs["num_steps"] = 1


def _both_divide() -> bool:
    return TRANSFORMERS.is_imported() and TRANSFORMERS.is_older(_FIRST_THAT_DIVIDES_ONCE)


def divide_once() -> None:
    """Let Trainers with a loss of this library as their `loss` divide it once. A second call does nothing.

    Raises:
        FrameworkError: for a transformers that is too old.
    """
    TRANSFORMERS.check()
    if _both_divide():
        _switch.enable()


@Switch
def _switch() -> Replacements:
    trainer = TRANSFORMERS.find("transformers", "Trainer")
    step = getattr(trainer, TRANSFORMERS.seam(trainer, "training_step"))

    @functools.wraps(step)
    def training_step(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = getattr(self, "loss", None)
        losses = [*loss.values()] if isinstance(loss, dict) else [loss]
        modules = (module for x in losses if isinstance(x, torch.nn.Module) for module in x.modules())
        if any(isinstance(module, AdaptedLoss) for module in modules):
            keep_accelerate_from_dividing()
        return step(self, *args, **kwargs)

    return [(trainer, {"training_step": training_step})]
