"""Replace the loss of Tevatron's retriever trainers.

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
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from .._framework import Framework
from .._passages import passages_loss, refuse
from ..grad_cache import install as install_grad_cache

TEVATRON = Framework("tevatron", ("0.0.1 of July 2026",), "pip install . in a checkout of github.com/texttron/tevatron")

_MARK = "_wholebatch_replaced"
_log = logging.getLogger("wholebatch")
_trainer: ContextVar[Any] = ContextVar("trainer whose compute_loss is running", default=None)


def install() -> None:
    """Let Tevatron's retriever trainers use the loss of the whole batch, and this library's gradient caching.

    The classes of Tevatron are changed in place, so the order of imports does not matter, except that nothing may have
    imported another grad_cache. A second call has no effect.

    Raises:
        ImportError: if Tevatron or a package that it imports is missing, if it lacks a method that is replaced, or if
            another grad_cache has been imported before.
    """
    install_grad_cache()
    trainers, cached, encoders = (
        TEVATRON.load(f"tevatron.retriever.{name}") for name in ("trainer", "gc_trainer", "modeling.encoder")
    )
    trainer = getattr(trainers, TEVATRON.seam(trainers, "TevatronTrainer"))
    cached_trainer = getattr(cached, TEVATRON.seam(cached, "GradCacheTrainer"))
    encoder = getattr(encoders, TEVATRON.seam(encoders, "EncoderModel"))
    output = getattr(encoders, TEVATRON.seam(encoders, "EncoderOutput"))
    for cls, names in (
        (trainer, ["compute_loss"]),
        (encoder, ["forward", "encode_query", "encode_passage", "compute_similarity", "compute_loss"]),
    ):
        for name in names:
            TEVATRON.seam(cls, name)
    _replace(trainer, "compute_loss", _marking)
    _replace(encoder, "forward", lambda theirs: _forward(theirs, encoder, output))
    _replace(cached_trainer, "__init__", lambda theirs: _init(theirs, encoder))


def _replace(cls: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method, once."""
    theirs = getattr(cls, name)
    if not hasattr(theirs, _MARK):
        ours = functools.wraps(theirs)(make(theirs))
        setattr(ours, _MARK, True)
        setattr(cls, name, ours)


def _marking(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return TevatronTrainer.compute_loss, which of the model's output uses nothing but the loss."""

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _trainer.set(self)
        try:
            return theirs(self, *args, **kwargs)
        finally:
            _trainer.reset(token)

    return compute_loss


def _forward(theirs: Callable[..., Any], base: Any, output: Callable[..., Any]) -> Callable[..., Any]:
    """Return EncoderModel.forward."""

    def forward(self: Any, query: Any = None, passage: Any = None) -> Any:
        trainer = _trainer.get()
        if trainer is None or not self.training or not query or not passage or not _has_their_loss(self, base):
            return theirs(self, query, passage)
        loss = _loss(self, self.encode_query(query), self.encode_passage(passage))
        return output(loss=_with_value_times(loss, trainer._dist_loss_scale_factor))

    return forward


def _init(theirs: Callable[..., Any], base: Any) -> Callable[..., Any]:
    """Return GradCacheTrainer.__init__, which makes the GradCache that each step calls."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        theirs(self, *args, **kwargs)
        if not _has_their_loss(self.model, base):
            return
        if self.is_world_process_zero():
            _explain(self)

        def loss_fn(x: Tensor, y: Tensor) -> Tensor:
            loss = _loss(self.model, x, y) / self.current_gradient_accumulation_steps
            return _with_value_times(loss, self._dist_loss_scale_factor)

        self.gc.loss_fn = loss_fn

    return __init__


def _has_their_loss(model: Any, base: Any) -> bool:
    """Return whether the loss is the cross-entropy of dot products; a subclass may compute another."""
    return all(getattr(type(model), name) is getattr(base, name) for name in ("compute_similarity", "compute_loss"))


def _loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Return L of the queries and passages of all processes: k passages for each query, the first is its own."""
    if len(x) == 0 or len(y) % len(x):
        refuse(
            f"Tevatron's batch must have the same number of passages for each query, got {len(x)} queries and {len(y)} "
            "passages",
            "Tevatron",
            None,
        )
    return passages_loss(x, y, len(y) // len(x), caller="Tevatron", temperature=model.temperature)


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
