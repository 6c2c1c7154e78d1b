"""The parameters of a loss in the checkpoints of their trainer, which optimizes them, but saves the model alone."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._framework import SENTENCE_TRANSFORMERS, FrameworkError, Replacements, Switch

FILE = "loss.safetensors"
_FIRST_WITH_ZERO_GRAD = "6.2"  # earlier trainers never clear the gradients of a loss's parameters


def _parameters_of_losses(trainer: Any) -> dict[str, Tensor]:  # their trainer
    """Return the parameters that the losses of a trainer train beside its model, by their names."""
    losses = trainer.loss if isinstance(trainer.loss, dict) else {"loss": trainer.loss}
    guides = [module.guide for loss in losses.values() for module in loss.modules() if hasattr(module, "guide")]
    others = {id(x) for module in (trainer.model, *guides) for x in module.parameters()}
    return {
        f"{key}.{name}": x
        for key, loss in losses.items()
        for name, x in loss.named_parameters()
        if x.requires_grad and id(x) not in others
    }


@Switch
def _switch() -> Replacements:
    trainer = SENTENCE_TRANSFORMERS.find("sentence_transformers.base.trainer", "BaseTrainer")
    save = getattr(trainer, SENTENCE_TRANSFORMERS.seam(trainer, "_save"))
    load = getattr(trainer, SENTENCE_TRANSFORMERS.seam(trainer, "_load_from_checkpoint"))

    @functools.wraps(save)
    def save_with_losses(self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        save(self, output_dir, *args, **kwargs)
        parameters = {name: x.detach().cpu() for name, x in _parameters_of_losses(self).items()}
        if parameters:
            from safetensors.torch import save_file

            save_file(parameters, Path(output_dir or self.args.output_dir) / FILE)

    @functools.wraps(load)
    @torch.no_grad()
    def load_with_losses(self: Any, checkpoint_path: str, *args: Any, **kwargs: Any) -> None:
        load(self, checkpoint_path, *args, **kwargs)
        parameters = _parameters_of_losses(self)
        if not parameters:
            return
        from safetensors.torch import load_file

        path = Path(checkpoint_path) / FILE
        saved = load_file(path) if path.exists() else {}
        if saved.keys() != parameters.keys():
            raise ValueError(
                f"{path} must have the parameters of the loss, {', '.join(parameters)}, got "
                f"{', '.join(saved) or 'none'}: they would restart at their first values; train with the same loss, or "
                "resume from a checkpoint that was saved with it"
            )
        for name, x in parameters.items():
            x.copy_(saved[name])

    return [(trainer, {"_save": save_with_losses, "_load_from_checkpoint": load_with_losses})]


def keep_parameters() -> None:
    """Let their trainers save and load the parameters of losses, if their library is there. A second call does nothing.

    Raises:
        FrameworkError: if their trainer would add up the gradients of these parameters over all steps.
    """
    if not SENTENCE_TRANSFORMERS.is_imported():
        return
    if SENTENCE_TRANSFORMERS.is_older(_FIRST_WITH_ZERO_GRAD):
        raise FrameworkError(
            f"sentence_transformers before {_FIRST_WITH_ZERO_GRAD} never clears the gradient of a loss's parameter; "
            "pass a number as scale, or: pip install 'sentence-transformers>=6.2'"
        )
    _switch.enable()
