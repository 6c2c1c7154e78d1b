"""What the loop trains: data, networks, a loss of the global batch, and how the result is judged."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from .._user_error import UserError
from .config import TrainConfig


@dataclass(frozen=True)
class Curve:
    """A number that validations give, to be drawn over the steps."""

    label: str
    keys: tuple[str, ...]  # by which it is found in a validation
    color: str
    style: str = "-"


class Task(ABC):
    """One rank's part of it. Calls marked "all ranks" communicate."""

    optimizers: Sequence[Optimizer]
    """Of what all ranks hold, and of what each has of its own; their groups say `peak`, the largest learning rate."""
    curves: Sequence[Curve]
    """Of the validations."""
    validation_title: str
    """Above these curves."""

    @abstractmethod
    def describe(self) -> str:
        """The data, in a line."""

    @abstractmethod
    def add_gradients(self, step: int) -> Tensor:
        """The loss of the step's global batch, its gradient added to all parameters'. All ranks."""

    @abstractmethod
    def gradients(self) -> dict[str, Tensor]:
        """By parameter, as the optimizers find them; what ranks have parts of, whole. All ranks."""

    @abstractmethod
    def grad_norm(self) -> float:
        """Euclidean norm of the whole gradient. All ranks."""

    def after_step(self) -> None:  # noqa: B027  # most have nothing to do
        """The optimizers have made their step."""

    def metrics(self) -> dict[str, Any]:
        """What a line of metrics.jsonl says beside loss, learning rate and norm."""
        return {}

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """What held-out data say during training; only rank 0's answer counts. All ranks."""

    @abstractmethod
    def headline(self, validation: Mapping[str, Any]) -> str:
        """A validation in a few words."""

    @abstractmethod
    def memory(self) -> dict[str, Tensor]:
        """What a forward pass changes, as it is now."""

    @abstractmethod
    def save(self, folder: Path, memory: Mapping[str, Tensor], *, step: int, seconds: float) -> None:
        """Write a checkpoint, with this memory in the place of the present one. All ranks."""

    @abstractmethod
    def load(self, folder: Path) -> dict[str, Any]:
        """Read the last one; returns its facts. All ranks."""

    @abstractmethod
    def judge(self) -> dict[str, Any]:
        """The report: what the test set says. Only rank 0's answer counts. All ranks."""

    @abstractmethod
    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """The report for people: a title, the columns' names, rows."""

    @abstractmethod
    def weights(self) -> dict[str, Tensor]:
        """The final weights, on rank 0. All ranks."""

    def facts(self) -> dict[str, str]:
        """What is written beside the final weights."""
        return {}

    @abstractmethod
    def draw(self, folder: Path) -> None:
        """Pictures of what `judge` has found."""


def make_adamw(encoder: nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW, decay on matrices only. eps well above rounding: a gradient of pure rounding noise stays a small step."""
    matrices = [p for p in encoder.parameters() if p.dim() > 1]
    others = [p for p in encoder.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    peak = config.learning_rate
    return AdamW([group | {"peak": peak} for group in groups], lr=peak, betas=(0.9, 0.98), eps=1e-6)


def finite_loss(loss_fn: Callable[..., Tensor], *features: Any, step: int, **named: Any) -> Tensor:
    """The loss of the global batch, or the end of the run if it is not finite."""
    try:
        loss = loss_fn(*features, **named)
    except ValueError as error:
        raise stopped(step, str(error)) from error
    if not math.isfinite(loss.item()):
        raise stopped(step, f"the loss is {loss.item()}")
    return loss


def stopped(step: int, why: str) -> UserError:
    """The error that ends a run whose numbers are no longer finite."""
    return UserError(
        f"training stopped in step {step + 1}: {why}. An earlier checkpoint, if there is one, is kept; a new run "
        "with a lower --learning-rate is the usual remedy"
    )
