"""What a rank does: one step of the problem on its rows, and what came of it, observed from outside.

Hooks on the parameters see each gradient that a backward pass brings, before any engine does; hooks on the model see
which of its calls got a gradient back.
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
from torch.nn.parallel import DistributedDataParallel

from .._graph import leaves_of
from .._user_error import UserError
from ..gradcache.inputs import tensors_of
from ..gradcache.replicas import without_comparison
from ..partition import Partition
from .problem import (
    Problem,
    build,
    check_known,
    modules,
    num_rows,
    parameters,
    random_state,
    seed_all,
    sharded_names,
    take,
    unheard,
    with_gradient,
)
from .replay_collectives import Recording, Replaying
from .sync_batch_norm import make_runnable

Quiet = Literal["dropout", "batch_norm", "all"]
_FORWARD_SEED = 1000  # what the forward pass draws does not depend on how much the factory drew


@dataclass(frozen=True)
class Nudge:
    """A group of parameters is moved along its direction, on one rank, or with communication held fixed on all."""

    group: str
    rank: int | None
    by: float


@dataclass(frozen=True)
class Trial:
    """One evaluation of the problem.

    Args:
        counts: rows of each rank; (-1,): all of them on one.
        rows: of the global batch, in order, rank 0's first.
        reference: the problem's reference is evaluated, on one rank; its own loss if it has none.
        quiet: modules that are in evaluation mode: "dropout", "batch_norm", "all".
        nudge: is applied before; then no gradient is taken.
        inputs: whether the gradient by the batch's floating-point tensors is taken.
        but: one of the batch's inputs, and other rows that it gives in their place.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]
    reference: bool = False
    quiet: tuple[Quiet, ...] = ()
    nudge: Nudge | None = None
    inputs: bool = True
    but: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Job:
    """Trials of one problem, in order, on the ranks of a process group."""

    factory: bytes | str  # pickled
    trials: tuple[Trial, ...]
    dtype: torch.dtype
    seed: int
    directions: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)  # of each group's parameters


@dataclass(frozen=True)
class Answer:
    """What a trial showed on one rank.

    Args:
        loss: its value.
        gradients: by parameter, as the optimizer finds them: from rank 0, and from ranks where they are others.
        contributed: on one process, the sum of everything that backward passes brought.
        last: there, what the last one brought.
        passes: how many brought something.
        missing: parameters that got none on this rank.
        inputs: the gradients of this rank's rows.
        calls: for each call of the model with gradients on, whether its output got one.
        drew: whether torch's generator has moved.
        said: what was printed.
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
    said: str = ""
    facts: Facts | None = None


@dataclass(frozen=True)
class Facts:
    """What the parent needs to know of a problem that only ranks have seen."""

    rows: int
    engine: str
    uneven: bool
    empty: bool
    has_reference: bool
    calls_backward: bool
    has_batch_norm: bool
    sharded: tuple[str, ...]


@dataclass(frozen=True)
class Mistake:
    """Of the user's, on one process, in the words that he is to read."""

    message: str


def run_trials(job: Job) -> list[Answer] | Mistake:
    """A rank's part of a job."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the audit is of CPU processes, wherever it runs
    torch.set_num_threads(1)
    recorded: Recording | None = None
    answers = []
    warnings.simplefilter("ignore")  # they have been seen in training, and come from every rank and trial
    try:
        for trial in job.trials:
            if trial.nudge is None or trial.nudge.rank is not None:
                answers.append(_run_trial(job, trial, nullcontext()))
                continue
            if recorded is None:
                recorded = Recording()
                _run_trial(job, replace(trial, nudge=replace(trial.nudge, by=0.0)), recorded)
            answers.append(_run_trial(job, trial, Replaying(recorded)))
    except UserError as error:
        if dist.get_world_size() > 1:
            raise  # other ranks may be waiting for this one
        return Mistake(str(error))
    return answers


def _run_trial(job: Job, trial: Trial, communication: AbstractContextManager[Any]) -> Answer:
    rank = dist.get_rank()
    with unheard() as said:
        factory = job.factory if isinstance(job.factory, str) else pickle.loads(job.factory)
        problem = build(factory, job.seed, job.dtype)
        by_reference = trial.reference and problem.reference is not None
        local_parts = sharded_names(problem)
        _share_start(problem, local_parts)
        for module in modules(problem):
            _quieten(module, trial.quiet)
            make_runnable(module)
        batch, inputs = problem.batch, dict[str, Tensor]()
        if trial.counts != (-1,):
            local = Partition(trial.counts).rows(rank)
            batch = take(batch, trial.rows[local], but=(trial.but[0], trial.but[1][local]) if trial.but else None)
        if trial.inputs and trial.nudge is None:
            batch, inputs = with_gradient(batch)
        seed_all(_FORWARD_SEED + job.seed + rank)
        before = random_state()
        seen = _Seen(problem)
        given: nn.Module = problem.model
        if problem.wraps and not by_reference:
            ours = [name.removeprefix("loss.") for name in local_parts]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(given, ours)
            given = problem.engine(given) if callable(problem.engine) else DistributedDataParallel(given)
        if trial.nudge is not None:  # only now: DDP begins with rank 0's parameters
            _apply(trial.nudge, parameters(problem), job.directions, rank)
        with communication, nullcontext() if trial.nudge is None else without_comparison():
            loss = _evaluate(
                problem, given, batch, inputs.values(), reference=by_reference, backward=trial.nudge is None
            )
        drew = random_state() != before
    facts = Facts(
        num_rows(problem.batch),
        "ddp" if callable(problem.engine) else problem.engine,
        problem.uneven,
        problem.empty,
        problem.reference is not None,
        problem.step is not None,
        any(isinstance(module, _BatchNorm) for module in problem.model.modules()),
        tuple(local_parts),
    )
    if trial.nudge is not None:
        return Answer(loss, facts=facts)
    found = {name: p for name, p in parameters(problem).items() if p.requires_grad}
    engine = "sum" if by_reference else facts.engine
    gradients = _after(engine, _dense({n: p.grad for n, p in found.items()}, found), local_parts)
    others = engine in ("none", "ddp") and _differ_from_rank_0(gradients)  # nothing here has made them one
    tells = rank == 0 or others
    alone = dist.get_world_size() == 1
    return Answer(
        loss,
        gradients if tells else {},
        _dense(seen.total, found) if alone else {},
        _dense(seen.last, found) if alone else {},
        seen.passes,
        tuple(name for name, p in found.items() if p.grad is None),
        {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()},
        tuple(seen.calls),
        drew,
        said(),
        facts,
    )


def _evaluate(
    problem: Problem, model: nn.Module, batch: Any, inputs: Collection[Tensor], *, reference: bool, backward: bool
) -> float:
    """The value of the loss; gradients are in the parameters."""
    call = problem.reference if reference else problem.call
    what = "reference" if reference else "loss" if problem.step is None else "step"
    assert call is not None
    try:
        loss = call(model, batch)
    except SystemExit as error:
        raise RuntimeError(f"{what} left by exit({error.code!r})") from error
    if what == "step" and isinstance(loss, int | float):
        loss = torch.tensor(float(loss), dtype=torch.float64)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"{what}(model, batch) must return the loss, a tensor of one number; got {got}")
    if not loss.isfinite():
        raise UserError(f"the loss is {loss.item()}: nothing can be compared")
    if what != "step" and backward:
        if not loss.requires_grad:
            raise UserError(
                f"what {what}(model, batch) returned has no gradient; if it calls backward() itself, give it as step="
            )
        learned = [leaf for leaf in leaves_of([loss]) if isinstance(leaf, nn.Parameter)]
        check_known(problem, [leaf for leaf in learned if not any(leaf is x for x in inputs)])
        try:
            loss.backward()
        except RuntimeError as error:
            if "through the graph a second time" not in str(error):
                raise
            raise UserError(f"{what}(model, batch) has called backward() itself: give it as step=") from error
    return loss.item()


def _share_start(problem: Problem, local_parts: Sequence[str]) -> None:
    """All ranks start from rank 0's parameters and buffers, as engines see to it."""
    if dist.get_world_size() == 1:
        return
    kept = {id(p) for name, p in parameters(problem).items() if name in local_parts}
    heads = {name.rpartition(".")[0] for name in local_parts}
    for module in modules(problem):
        for p in module.parameters():
            if id(p) not in kept:
                _as_on_rank_0(p.data)
        for name, buffer in module.named_buffers():
            if name.rpartition(".")[0] not in heads:
                _as_on_rank_0(buffer.data)


def _as_on_rank_0(x: Tensor) -> None:
    """As bytes, for not every dtype travels as it is. Collective."""
    if x.numel():
        sent = x.detach().clone().reshape(-1).view(torch.uint8)
        dist.broadcast(sent, 0)
        x.copy_(sent.view(x.dtype).view(x.shape))


def _quieten(model: nn.Module, quiet: Sequence[Quiet]) -> None:
    for module in model.modules():
        if (
            ("all" in quiet and not isinstance(module, _BatchNorm))
            or ("dropout" in quiet and isinstance(module, _DropoutNd))
            or ("batch_norm" in quiet and isinstance(module, _BatchNorm))
        ):
            module.training = False


@torch.no_grad()
def _apply(
    nudge: Nudge, found: Mapping[str, Tensor], directions: Mapping[str, Mapping[str, Tensor]], rank: int
) -> None:
    if nudge.rank in (rank, None):
        for name, direction in directions[nudge.group].items():
            found[name].add_(direction.to(found[name]), alpha=nudge.by)


class _Seen:
    """What hooks on parameters and model see during a step."""

    def __init__(self, problem: Problem) -> None:
        self.total: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] = {}
        self.passes: dict[str, int] = {}
        self.calls: list[bool] = []
        for name, p in parameters(problem).items():
            if p.requires_grad:
                p.register_hook(lambda grad, name=name: self._brought(name, grad))
        problem.model.register_forward_hook(self._called)

    def _brought(self, name: str, grad: Tensor) -> None:
        grad = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()
        self.last[name] = grad
        self.total[name] = self.total[name] + grad if name in self.total else grad
        self.passes[name] = self.passes.get(name, 0) + 1

    def _called(self, _model: nn.Module, _inputs: Any, output: Any) -> None:
        outputs = [x for x in tensors_of(output) if x.requires_grad and x.grad_fn is not None]
        if not torch.is_grad_enabled() or not outputs:
            return
        number = len(self.calls)
        self.calls.append(False)

        def got(grad: Tensor) -> None:
            self.calls[number] = self.calls[number] or bool(grad.count_nonzero())

        for x in outputs:
            if x.numel() > 1:  # a scale is its own affair
                x.register_hook(got)


def _dense(grads: Mapping[str, Tensor | None], found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Each parameter's gradient, 0 where there is none."""
    made = {}
    for name, p in found.items():
        grad = grads.get(name)
        made[name] = torch.zeros_like(p) if grad is None else (grad.to_dense() if grad.is_sparse else grad)
    return made


def _after(engine: str, of_rank: Mapping[str, Tensor], local_parts: Sequence[str]) -> dict[str, Tensor]:
    """What the engine makes of the ranks' gradients; of parameters in parts, all of them. Collective."""
    made, size = {}, dist.get_world_size()
    for name, x in of_rank.items():
        if name in local_parts:
            made[name] = _joined(x)
        elif engine in ("none", "ddp"):
            made[name] = x.detach()
        else:
            summed = x.detach().clone()
            dist.all_reduce(summed)
            made[name] = summed / size if engine == "mean" else summed
    return made


def _differ_from_rank_0(gradients: Mapping[str, Tensor]) -> bool:
    """Whether this rank's are others than rank 0's. Collective."""
    differ = False
    for x in gradients.values():
        of_rank_0 = x.detach().clone()
        dist.broadcast(of_rank_0, 0)
        differ = differ or not torch.allclose(x, of_rank_0, rtol=1e-9, atol=0)
    return differ


def _joined(x: Tensor) -> Tensor:
    """All ranks' rows. Collective."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return torch.cat(parts)
