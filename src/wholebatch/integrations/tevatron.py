r"""Tevatron's retriever training with the loss of the whole batch, with and without `--grad_cache`.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.tevatron \
        -m tevatron.retriever.driver.train --model_name_or_path ... --grad_cache

runs Tevatron's driver, trainer and model with its options; the loss is another, and so is `grad_cache`. In a program of
your own call `install()` before a trainer is made. It replaces

    TevatronTrainer     while its compute_loss runs, EncoderModel.forward computes the loss of the whole batch in tiles
    GradCacheTrainer    gets the same loss of the cached representations

Whoever else calls the model, such as the trainers of SPLADE and of distillation, gets Tevatron's own forward, with the
scores and gathered representations that they use.

Tevatron's trainers divide the value of a step's loss by W, the number of processes, for the log, since the loss in its
model is multiplied by W. So the value here is W L as well; the gradient is that of L after the averaging of the engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ._accumulation import keep_accelerate_from_dividing
from ._command import program_of, run_command
from ._framework import TEVATRON, Replacements, Switch
from ._passages import passages_loss
from .grad_cache import install as install_grad_cache

__all__ = ["install"]

USAGE = """\
usage: python -m wholebatch.integrations.tevatron -m tevatron.retriever.driver.train OPTIONS OF TEVATRON
       python -m wholebatch.integrations.tevatron SCRIPT.py [ARGUMENTS]

Runs one of Tevatron's drivers, or a program that uses its trainers, with the loss of the whole batch.
"""

_log = logging.getLogger("wholebatch")
_trainer: ContextVar[Any] = ContextVar("trainer whose compute_loss is running", default=None)


@Switch
def _switch() -> Replacements:
    trainer = TEVATRON.find("tevatron.retriever.trainer", "TevatronTrainer")
    cached_trainer = TEVATRON.find("tevatron.retriever.gc_trainer", "GradCacheTrainer")
    encoder = TEVATRON.find("tevatron.retriever.modeling.encoder", "EncoderModel")
    output = TEVATRON.find("tevatron.retriever.modeling.encoder", "EncoderOutput")
    TEVATRON.seam(trainer, "compute_loss")
    for name in ("forward", "encode_query", "encode_passage", "compute_similarity", "compute_loss"):
        TEVATRON.seam(encoder, name)
    their_compute_loss, their_forward, their_init = trainer.compute_loss, encoder.forward, cached_trainer.__init__

    def has_their_loss(model: Any) -> bool:
        """Return whether the loss is the cross-entropy of dot products; a subclass may compute another."""
        return all(
            getattr(type(model), name) is getattr(encoder, name) for name in ("compute_similarity", "compute_loss")
        )

    @functools.wraps(their_compute_loss)
    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:  # of the model's output it uses the loss alone
        token = _trainer.set(self)
        try:
            return their_compute_loss(self, *args, **kwargs)
        finally:
            _trainer.reset(token)

    @functools.wraps(their_forward)
    def forward(self: Any, query: Any = None, passage: Any = None) -> Any:
        trainer = _trainer.get()
        if trainer is None or not self.training or not query or not passage or not has_their_loss(self):
            return their_forward(self, query, passage)
        keep_accelerate_from_dividing()
        loss = _loss(self, self.encode_query(query), self.encode_passage(passage))
        return output(loss=_with_value_times(loss, trainer._dist_loss_scale_factor))

    @functools.wraps(their_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:  # makes the GradCache that each step calls
        their_init(self, *args, **kwargs)
        if not has_their_loss(self.model):
            return
        if self.is_world_process_zero():
            _explain(self)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            loss = _loss(self.model, x, y) / self.current_gradient_accumulation_steps
            return _with_value_times(loss, self._dist_loss_scale_factor)

        self.gc.loss_fn = loss_fn

    return [
        (trainer, {"compute_loss": compute_loss}),
        (encoder, {"forward": forward}),
        (cached_trainer, {"__init__": init}),
    ]


def install() -> None:
    """Let Tevatron's retriever trainers use the loss of the whole batch, and this library's gradient caching.

    The classes of Tevatron are changed in place, so the order of imports does not matter, except that nothing may have
    imported another grad_cache. A second call has no effect.

    Raises:
        ImportError: if Tevatron or a package that it imports is missing, if it lacks a method that is replaced, or if
            another grad_cache has been imported before.
    """
    install_grad_cache()
    _switch.enable()


def start(argv: Sequence[str]) -> Callable[[], None]:
    """Return the program of the command."""
    install()
    return program_of(argv)


def _loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return L of the queries and passages of all processes: k passages for each query, the first is its own."""
    return passages_loss(x, y, caller="Tevatron", temperature=model.temperature)


def _with_value_times(loss: Tensor, factor: int) -> Tensor:
    """Return a loss with its gradient, and its value times a factor, by which the trainer divides it for the log."""
    with torch.no_grad():
        rest = loss * (factor - 1)
    return loss + rest


def _explain(trainer: Any) -> None:
    temperature, steps = trainer.model.temperature, trainer.args.gradient_accumulation_steps
    if temperature != 1:
        _log.warning(f"--temperature {temperature} counts with --grad_cache; Tevatron alone ignores it there.")
    if steps > 1:
        _log.warning(
            f"--gradient_accumulation_steps {steps} with --grad_cache: the gradient is the mean over the steps, as "
            f"without --grad_cache; Tevatron alone adds them up, {steps} times as much."
        )


if __name__ == "__main__":
    run_command("tevatron")
