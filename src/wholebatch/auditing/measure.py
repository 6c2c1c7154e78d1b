"""A rank's part of an audit: for each trial, run the problem on its rows, and report loss, gradients and observations.

Trials and answers are the messages between an audit and its ranks.
"""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .._base.graph import leaves_of
from .._base.user_error import UserError
from ..comm import select_communicator
from ..gradcache.same_parameters import without_comparison
from ..partition import Partition
from .batch import num_rows, take, with_gradient
from .engine import broadcast_start, dense, differ_from_rank_0, make_runnable, reduce_gradients, wrap
from .factory import build
from .observe import Observer, Recording, Replaying
from .problem import Problem, check_known, modules, parameters, sharded_names
from .process_state import random_state, seed_all, suppress_output

EvalModules = Literal["dropout", "batch_norm", "all"]
_FORWARD_SEED = 1000  # the forward pass draws the same numbers, however many the factory drew


@dataclass(frozen=True)
class Perturbation:
    """A step of parameters along a direction, on one rank, or on all with collectives held fixed."""

    direction: Mapping[str, Tensor]  # by parameter
    rank: int | None  # the rank that moves; None: all ranks, while collectives return what they returned before
    by: float  # the length of the step


@dataclass(frozen=True)
class Trial:
    """One evaluation of the problem."""

    counts: tuple[int, ...]  # rows of each rank; (-1,): all of them on one rank
    rows: tuple[int, ...]  # indices into the global batch, in order, rank 0's first
    reference: bool = False  # whether the problem's reference is evaluated, on one rank; the loss if it has none
    eval_modules: tuple[EvalModules, ...] = ()  # modules in evaluation mode; "all": all but BatchNorm
    perturbation: Perturbation | None = None  # applied before the evaluation; then no gradient is taken
    but: tuple[str, tuple[int, ...]] | None = None  # one of the batch's inputs, and its rows instead of `rows`


@dataclass(frozen=True)
class Job:
    """Trials of one problem, in order, on the ranks of a process group."""

    factory: bytes | str  # pickled, or its name
    trials: tuple[Trial, ...]
    dtype: torch.dtype
    seed: int
    inputs: bool  # whether the gradients by the batch's floating-point tensors are taken, too


@dataclass(frozen=True)
class Answer:
    """The outcome of a trial on one rank; dictionaries are by parameter, but that of inputs."""

    loss: float
    facts: Facts
    # gradients: as the optimizer finds them: from rank 0, and from every rank where ranks differ
    gradients: dict[str, Tensor] = field(default_factory=dict)
    contributed: dict[str, Tensor] = field(default_factory=dict)  # on one process, the sum of all backward passes'
    last: dict[str, Tensor] = field(default_factory=dict)  # on one process, that of the last backward pass
    passes: dict[str, int] = field(default_factory=dict)  # the number of backward passes that reached a parameter
    missing: tuple[str, ...] = ()  # parameters without a gradient on this rank
    inputs: dict[str, Tensor] = field(default_factory=dict)  # the gradients of this rank's rows
    calls: tuple[bool, ...] = ()  # for each call of the model with gradients on, whether its output received one
    drew: bool = False  # whether the default generators were used
    printed: str = ""  # the standard output


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


def run_trials(job: Job) -> list[Answer] | str:
    """Run a job's trials on this rank, or return the message of a user's mistake on one process. Collective."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the audit runs on CPU processes, whatever the machine has
    torch.set_num_threads(1)
    recorded: Recording | None = None
    answers = []
    select_communicator(None).handshake(dict, caller="audit")  # a group's first one compares versions, and no later one
    warnings.simplefilter("ignore")  # the user has seen them in training; here every rank and trial would repeat them
    try:
        for trial in job.trials:
            if trial.perturbation is None or trial.perturbation.rank is not None:
                answers.append(_run_trial(job, trial, nullcontext()))
                continue
            if recorded is None:
                recorded = Recording()
                _run_trial(job, replace(trial, perturbation=replace(trial.perturbation, by=0.0)), recorded)
            answers.append(_run_trial(job, trial, Replaying(recorded)))
    except UserError as error:
        if dist.get_world_size() > 1:
            raise  # other ranks may be waiting for this one
        return str(error)
    return answers


def _run_trial(job: Job, trial: Trial, communication: AbstractContextManager[Any]) -> Answer:
    rank, backward = dist.get_rank(), trial.perturbation is None
    with suppress_output() as printed:
        factory = job.factory if isinstance(job.factory, str) else pickle.loads(job.factory)
        problem = build(factory, job.seed, job.dtype)
        by_reference = trial.reference and problem.reference is not None
        sharded = sharded_names(problem)
        broadcast_start(problem, sharded)
        for module in modules(problem):
            _switch_to_eval(module, trial.eval_modules)
            make_runnable(module)
        batch = _rows_of_rank(problem.batch, trial, rank)
        inputs: dict[str, Tensor] = {}
        if job.inputs and backward:
            batch, inputs = with_gradient(batch)
        seed_all(_FORWARD_SEED + job.seed + rank)
        before = random_state()
        observer = Observer(problem)
        model = problem.model if by_reference else wrap(problem, sharded)
        if trial.perturbation is not None:  # only now, because DDP starts from rank 0's parameters
            _apply(trial.perturbation, parameters(problem), rank)
        with communication, nullcontext() if backward else without_comparison():
            loss = _evaluate(problem, model, batch, inputs.values(), reference=by_reference, backward=backward)
        drew = random_state() != before
    facts = _facts(problem, sharded)
    if not backward:
        return Answer(loss, facts)
    trained = {name: p for name, p in parameters(problem).items() if p.requires_grad}
    engine = "sum" if by_reference else facts.engine
    gradients = reduce_gradients(engine, dense({n: p.grad for n, p in trained.items()}, trained), sharded)
    differ = engine in ("none", "ddp") and differ_from_rank_0(gradients)  # the others were just made equal
    alone = dist.get_world_size() == 1
    return Answer(
        loss,
        facts,
        gradients if rank == 0 or differ else {},
        dense(observer.total, trained) if alone else {},
        dense(observer.last, trained) if alone else {},
        observer.passes,
        tuple(name for name, p in trained.items() if p.grad is None),
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()},
        tuple(observer.calls),
        drew,
        printed(),
    )


def _rows_of_rank(batch: Any, trial: Trial, rank: int) -> Any:
    if trial.counts == (-1,):
        return batch
    local = Partition(trial.counts).rows(rank)
    return take(batch, trial.rows[local], but=(trial.but[0], trial.but[1][local]) if trial.but else None)


def _facts(problem: Problem, sharded: Sequence[str]) -> Facts:
    return Facts(
        num_rows(problem.batch),
        "ddp" if callable(problem.engine) else problem.engine,
        problem.uneven,
        problem.empty,
        problem.reference is not None,
        problem.step is not None,
        any(isinstance(module, _BatchNorm) for module in problem.model.modules()),
        tuple(sharded),
    )


def _evaluate(
    problem: Problem, model: nn.Module, batch: Any, inputs: Collection[Tensor], *, reference: bool, backward: bool
) -> float:
    """Return the value of the loss; with `backward`, leave gradients in the parameters."""
    call = problem.reference if reference else problem.call
    name = "reference" if reference else "loss" if problem.step is None else "step"
    assert call is not None
    try:
        loss = call(model, batch)
    except SystemExit as error:
        raise RuntimeError(f"{name} left by exit({error.code!r})") from error
    if name == "step" and isinstance(loss, int | float):
        loss = torch.tensor(float(loss), dtype=torch.float64)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"{name}(model, batch) must return the loss, a tensor of one number; got {got}")
    if not loss.isfinite():
        raise UserError(f"the loss is {loss.item()}: nothing can be compared")
    if name != "step" and backward:
        if not loss.requires_grad:
            raise UserError(
                f"the loss that {name}(model, batch) returned has no gradient; if it calls backward() itself, give it "
                "as step="
            )
        learned = [leaf for leaf in leaves_of([loss]) if isinstance(leaf, nn.Parameter)]
        check_known(problem, [leaf for leaf in learned if not any(leaf is x for x in inputs)])
        try:
            loss.backward()
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UserError(f"{name}(model, batch) has called backward() itself: give it as step=") from error
    return loss.item()


def _switch_to_eval(model: nn.Module, eval_modules: Sequence[EvalModules]) -> None:
    for module in model.modules():
        if (
            ("all" in eval_modules and not isinstance(module, _BatchNorm))
            or ("dropout" in eval_modules and isinstance(module, _DropoutNd))
            or ("batch_norm" in eval_modules and isinstance(module, _BatchNorm))
        ):
            module.training = False


@torch.no_grad()
def _apply(perturbation: Perturbation, tensors: Mapping[str, Tensor], rank: int) -> None:
    if perturbation.rank in (rank, None):
        for name, direction in perturbation.direction.items():
            tensors[name].add_(direction.to(tensors[name]), alpha=perturbation.by)
