"""A task for the training loop: data, networks, their precision, a loss of the global batch, measures of the result."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

import wholebatch as wb
from wholebatch.app import UserError

from ..config import TrainConfig
from ..data.loader import Feed, workers_of_a_rank
from ..data.sides import Side
from ..encoders.dual import DualEncoder
from ..encoders.encoder import Encoder
from ..encoders.tune import merged_state
from ..ranks.all_ranks import on_all_ranks
from ..ranks.sharding import shard_weights, whole_state
from ..report.page import Evidence
from ..run.checkpoint import Checkpoint, read_checkpoint, save_checkpoint
from .evaluation import features_of_rows
from .precision import Precision


class Curve(NamedTuple):
    """A number of each validation, to be drawn over the steps."""

    label: str
    keys: tuple[str, ...]  # its path in a validation

    def value(self, validation: Mapping[str, Any]) -> Any:
        return reduce(getitem, self.keys, validation)


class PassState(NamedTuple):
    """The tensors that a pass over a batch changes: a run that resumes before the optimizers' step makes it again."""

    loss: Mapping[str, Tensor]
    scaler: Mapping[str, Tensor]
    """Of the scale of --precision fp16; {} without one."""


class Task(ABC):
    """One rank's part of a task. Calls marked "all ranks" communicate."""

    optimizers: Sequence[Optimizer]
    """For replicated parameters, and for sharded ones if any; each group's `peak` is its largest learning rate."""
    curves: Sequence[Curve]
    """The curves of the validations."""
    validation_title: str
    """The title above these curves."""
    _state: nn.Module
    """The module that a checkpoint keeps: the encoders, with the loss if it has tensors of its own."""
    _loss: Callable[..., Tensor]
    """The loss of the global batch, by the features of this rank's rows."""
    _cached: wb.GradCache | None = None
    """With --chunk-size, the encoders and the loss, chunk by chunk."""
    _workers: int
    """Processes that read rows."""
    _batches: Feed[Any]
    """This rank's part of the batch of each step."""

    def __init__(
        self,
        config: TrainConfig,
        encoders: DualEncoder | Encoder,
        device: torch.device,
        *,
        rank: int,
        size: int,
        dense: bool,
    ) -> None:
        self._config, self._device, self._rank, self._ranks, self._dense = config, device, rank, size, dense
        self._rows = wb.partition.Partition.even(config.batch_size, size).rows(rank)
        self.module, self.precision = encoders, Precision(config.precision, device)
        self._is_trained = any(p.requires_grad for p in encoders.parameters())
        self._is_sharded = config.fsdp and size > 1 and not dense
        if self._is_sharded:
            shard_weights(encoders, device)
        else:
            encoders.to(device)
        if config.compile:
            for each in [m for m in encoders.modules() if isinstance(m, Encoder)]:
                each.compile(dynamic=True)
        self._optimizer = make_adamw(encoders, config)
        is_replicated = size > 1 and self._is_trained and not self._is_sharded
        self._model: nn.Module = DistributedDataParallel(encoders) if is_replicated else encoders

    def _feed(self, batches: Callable[[int], Any], sides: Iterable[Side], **chunking: Any) -> None:
        """Prepare the batch of each step ahead; with --chunk-size, encode it as `chunking` of GradCache says."""
        self._workers = workers_of_a_rank(self._config.workers, sides, self._ranks)
        self._batches = Feed(batches, stop=self._config.steps, workers=self._workers)
        if self._config.chunk_size and self._is_trained:
            self._cached = wb.GradCache(
                [self._model], self._config.chunk_size, self._loss, scaler=self.precision.scaler, **chunking
            )

    @abstractmethod
    def describe(self) -> str:
        """Return a line about the data."""

    @abstractmethod
    def add_gradients(self, step: int) -> Tensor:
        """Return the loss of the step's global batch, and add its gradient to the parameters'. All ranks."""

    def _add_gradients(
        self, batch: Any, encode: Callable[[], Any], loss_fn: nn.Module, named: Mapping[str, Any]
    ) -> Tensor:
        """Return the loss of a batch with these arguments, and add its gradient: by gradient caching, or at once."""

        def compute() -> Tensor:
            with self.precision.autocast():
                if self._cached is not None:
                    return self._cached(batch, **named)
                loss = self._loss(encode(), **named)
            return self.precision.backward(loss)

        return self.precision.add_gradients(compute, self.optimizers, loss_fn)

    @abstractmethod
    def encode_rows(self, rows: int) -> Tensor:
        """Return one number that depends on the features of the first so many rows of a batch, with its graph."""

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by parameter, as the optimizers get them: whole, sharded ones on rank 0. All ranks."""
        gradients = {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
        return whole_state(gradients, kept=self._rank == 0 or not self._is_sharded)

    @abstractmethod
    def grad_norm(self) -> float:
        """Return the Euclidean norm of the full gradient. All ranks."""

    def after_step(self) -> None:  # noqa: B027  # most tasks have nothing to do
        """Act after the optimizers' step."""

    def metrics(self) -> dict[str, Any]:
        """Return the figures of metrics.jsonl beside loss, learning rate and norm."""
        return {}

    @abstractmethod
    def validate(self) -> dict[str, Any]:
        """Return figures on held-out data during training; only rank 0's count. All ranks."""

    @abstractmethod
    def headline(self, validation: Mapping[str, Any]) -> str:
        """Return a validation in a few words."""

    def headline_figure(self, validation: Mapping[str, Any]) -> float:
        """Return the figure of a validation that --patience compares; larger is better."""
        return float(self.curves[0].value(validation))

    def pass_state(self) -> PassState:
        """Return a copy of the tensors that a pass over a batch changes, before the optimizers' step."""
        return PassState(self.loss_state(), self.precision.state())

    @abstractmethod
    def loss_state(self) -> dict[str, Tensor]:
        """Return a copy of the tensors that a forward pass changes."""

    def save(self, folder: Path, before: PassState, *, step: int, **facts: Any) -> None:
        """Write a checkpoint after `step` steps, with `facts` as `save_checkpoint` takes them. All ranks.

        `before` is the state before the last pass, or the present `pass_state`.
        """
        if self._rank == 0 or self._is_sharded:
            state = self._state.state_dict() | dict(before.loss)
            writes = self._rank == 0
            save_checkpoint(folder, state, self._optimizer, step=step, scaler=before.scaler, writes=writes, **facts)

    def load(self, folder: Path) -> dict[str, Any]:
        """Restore the last checkpoint; return its facts. All ranks."""

        def read() -> Checkpoint:
            steps, scaler = self._config.steps, self.precision.state()
            checkpoint = read_checkpoint(folder, self._state, self._optimizer, steps=steps, scaler=scaler)
            self._check_beside(folder, checkpoint.facts)
            return checkpoint

        checkpoint, _ = on_all_ranks("resume", read)
        self._load_beside(folder, checkpoint.facts)
        checkpoint.restore(self._state, self._optimizer)
        self.precision.restore(checkpoint.scaler)
        return checkpoint.facts

    def _check_beside(self, folder: Path, facts: Mapping[str, Any]) -> None:  # noqa: B027  # most have one file
        """Refuse further parts of a checkpoint that are not as they were written."""

    def _load_beside(self, folder: Path, facts: Mapping[str, Any]) -> None:  # noqa: B027
        """Restore further parts of a checkpoint. All ranks."""

    def _features_of(self, name: str, side: Side, rows: Tensor) -> Tensor:
        """Return the unit features of these rows of a side, on the CPU of rank 0, without augmentation. All ranks."""
        with self.precision.autocast():
            return features_of_rows(
                self.module, name, side, rows, self._device,
                workers=self._workers, chunk_size=self._config.chunk_size, ranks=self._ranks,
            )  # fmt: skip

    @abstractmethod
    def test(self) -> dict[str, Any]:
        """Return the report on the test set; only rank 0's counts. All ranks."""

    @abstractmethod
    def table(self, report: Mapping[str, Any]) -> tuple[str, Sequence[str], Sequence[Sequence[str]]]:
        """Return the report as a table: title, names of the columns, rows."""

    @abstractmethod
    def result(self, report: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the headline of the report: the name of a figure, its value, and a note such as the chance."""

    @abstractmethod
    def evidence(self) -> Evidence:
        """Return examples of the results of `test` and their similarities, on rank 0."""

    def weights(self) -> dict[str, Tensor]:
        """Return the final weights, on rank 0. All ranks."""
        return whole_state(merged_state(self.module), kept=True)

    def facts(self) -> dict[str, str]:
        """Return the metadata of the file of final weights."""
        return {}


def make_adamw(encoder: nn.Module, config: TrainConfig) -> Optimizer:
    """Make AdamW with decay on matrices only; eps is well above rounding, so that rounding noise makes small steps.

    Frozen parameters are left out. Each encoder in `encoder` has its factor of the learning rate; the groups of factor
    1 are the first two.
    """
    encoders = [m for m in encoder.modules() if isinstance(m, Encoder)]
    factors = {id(p): each.learning_rate_factor for each in encoders for p in each.parameters()}
    groups = []
    for factor in sorted({1.0, *factors.values()}, key=lambda factor: (factor != 1, factor)):
        trained = [p for p in encoder.parameters() if p.requires_grad and factors.get(id(p), 1.0) == factor]
        for params, decay in (
            ([p for p in trained if p.dim() > 1], config.weight_decay),
            ([p for p in trained if p.dim() <= 1], 0.0),
        ):
            groups.append({"params": params, "weight_decay": decay, "peak": factor * config.learning_rate})
    return AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.98), eps=1e-6)


def finite_loss(loss_fn: Callable[..., Tensor], *features: Any, step: int, **named: Any) -> Tensor:
    """Return the loss of the global batch; end the run if it is not finite."""
    try:
        loss = loss_fn(*features, **named)
    except ValueError as error:
        raise not_finite(step, str(error)) from error
    if not math.isfinite(loss.item()):
        raise not_finite(step, f"the loss is {loss.item()}")
    return loss


def not_finite(step: int, reason: str) -> UserError:
    """Return the error that ends a run whose numbers are no longer finite."""
    return UserError(
        f"training stopped in step {step + 1}: {reason}. An earlier checkpoint, if there is one, is kept; the usual "
        "fix is a new run with a lower --learning-rate"
    )
