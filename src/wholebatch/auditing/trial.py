"""The messages between an audit and its ranks: trials to run, and each rank's answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

EvalModules = Literal["dropout", "batch_norm", "all"]


@dataclass(frozen=True)
class Perturbation:
    """A step of a group's parameters along its direction, on one rank, or on all with collectives held fixed.

    Args:
        group: the group of parameters.
        rank: the rank that moves; None: all ranks, while collectives return what they returned before.
        by: the length of the step.
    """

    group: str
    rank: int | None
    by: float


@dataclass(frozen=True)
class Trial:
    """One evaluation of the problem.

    Args:
        counts: rows of each rank; (-1,): all of them on one rank.
        rows: indices into the global batch, in order, rank 0's first.
        reference: whether the problem's reference is evaluated, on one rank; the loss itself if it has none.
        eval_modules: modules in evaluation mode: "dropout", "batch_norm", "all" (but BatchNorm).
        perturbation: applied before the evaluation; then no gradient is taken.
        inputs: whether the gradient by the batch's floating-point tensors is taken.
        but: one of the batch's inputs, and the rows that it gives instead of `rows`.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]
    reference: bool = False
    eval_modules: tuple[EvalModules, ...] = ()
    perturbation: Perturbation | None = None
    inputs: bool = True
    but: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Job:
    """Trials of one problem, in order, on the ranks of a process group."""

    factory: bytes | str  # pickled, or its name
    trials: tuple[Trial, ...]
    dtype: torch.dtype
    seed: int
    directions: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # of each group's parameters


@dataclass(frozen=True)
class Answer:
    """The outcome of a trial on one rank.

    Args:
        loss: its value.
        gradients: by parameter, as the optimizer finds them: from rank 0, and from every rank where ranks differ.
        contributed: on one process, the sum of the gradients of all backward passes.
        last: on one process, the gradient of the last backward pass.
        passes: the number of backward passes that reached each parameter.
        missing: parameters without a gradient on this rank.
        inputs: the gradients of this rank's rows.
        calls: for each call of the model with gradients on, whether its output received one.
        drew: whether the default generators were used.
        printed: the standard output of the trial.
        facts: about the problem.
    """

    loss: float
    gradients: dict[str, Tensor] = field(default_factory=dict)
    contributed: dict[str, Tensor] = field(default_factory=dict)
    last: dict[str, Tensor] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    inputs: dict[str, Tensor] = field(default_factory=dict)
    calls: tuple[bool, ...] = ()
    drew: bool = False
    printed: str = ""
    facts: Facts | None = None


@dataclass(frozen=True)
class Facts:
    """Facts about a problem, which only the ranks have built."""

    rows: int
    engine: str
    uneven: bool
    empty: bool
    has_reference: bool
    calls_backward: bool
    has_batch_norm: bool
    sharded: tuple[str, ...]
