"""The audited problem: a model, a global batch, and a rank's loss or step of its rows.

A factory returns all three, because every rank makes its own. It is called many times, each time with the same seeds.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._base.settings import shown
from .._base.user_error import UserError
from ..heads import PartialFC
from .batch import num_rows

Engine = Literal["mean", "sum", "ddp", "none"] | Callable[[nn.Module], nn.Module]
_ENGINES = ("mean", "sum", "ddp", "none")


@dataclass(frozen=True)
class Problem:
    """A model, a global batch, and a rank's loss or step of its rows of the batch.

    Args:
        model: with the parameters whose gradients are compared, the temperature's among them.
        batch: of all ranks: a tree (mappings, lists, tuples) of tensors with the batch's rows first, and of lists with
            one text or number for each row. Tensors of shape () and other objects are the same on all ranks.
        loss: `loss(model, batch)`, a rank's forward pass from its rows of the batch to the scalar whose `backward()` it
            calls. `torch.distributed` is initialized during the call, with one rank, too.
        step: instead of `loss`, where training code calls `backward()` itself (gradient caching, accumulation):
            `step(model, batch)` leaves the gradients in the parameters and returns the value of the loss.
        reference: `reference(model, batch)`, the loss that one process computes of the whole batch; needed where `loss`
            or `step` on one rank may be wrong.
        engine: how gradients are reduced after the step. "mean": averaged over ranks; "sum": added; "ddp": a real
            `DistributedDataParallel` wraps the model, and `loss` gets the wrapper; a function of the model: as "ddp",
            with this function as the wrapper (`partial(DistributedDataParallel, find_unused_parameters=True)`);
            "none": not at all, because the step itself leaves the final gradient on every rank.
        uneven: whether ranks may have different numbers of rows; if so, such splits are audited, too.
        empty: whether ranks may have no rows; if so, such splits are audited, too.
        sharded: names, or beginnings of names, of parameters of which each rank holds a part, rank 0's rows first; no
            engine reduces their gradients. The parameters of a `wholebatch.PartialFC` are found automatically.
    """

    model: nn.Module
    batch: Any  # a tree of a user's form; so is the batch that functions get, with the model as an engine wraps it
    loss: Callable[[Any, Any], Any] | None = None  # (model, batch) of the caller's types
    _: KW_ONLY
    step: Callable[[Any, Any], Any] | None = None  # likewise
    reference: Callable[[Any, Any], Any] | None = None  # likewise
    engine: Engine = "mean"
    uneven: bool = False
    empty: bool = False
    sharded: Sequence[str] = field(default=())

    @property
    def wraps(self) -> bool:
        """Whether the engine wraps the model."""
        return self.engine == "ddp" or callable(self.engine)

    @property
    def call(self) -> Callable[[Any, Any], Any]:  # one of the above
        """Return `loss` or `step`, whichever was given."""
        function = self.step if self.loss is None else self.loss
        assert function is not None
        return function

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UserError(
                f"Problem's model must be a torch.nn.Module, got {type(self.model).__name__}; several go into a "
                "torch.nn.ModuleDict"
            )
        functions = [function for function in (self.loss, self.step) if function is not None]
        if len(functions) != 1 or not callable(functions[0]):
            raise UserError(
                "Problem needs loss=, a function loss(model, batch) that returns the scalar to call backward() of, or "
                "step=, one that has called it; one of the two"
            )
        if self.reference is not None and not callable(self.reference):
            raise UserError(f"Problem's reference must be a function, got {type(self.reference).__name__}")
        if not callable(self.engine) and (not isinstance(self.engine, str) or self.engine not in _ENGINES):
            raise UserError(
                f"Problem's engine must be one of {', '.join(_ENGINES)}, or a function that wraps the model; got "
                f"{shown(self.engine)}"
            )
        for name in ("uneven", "empty"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"Problem's {name} must be True or False, got {shown(getattr(self, name))}")
        if not isinstance(self.sharded, list | tuple) or not all(isinstance(name, str) for name in self.sharded):
            raise UserError(f"Problem's sharded must be a list of names of parameters, got {shown(self.sharded)}")
        if isinstance(self.model, DistributedDataParallel):
            raise UserError(
                "Problem's model is wrapped by DistributedDataParallel: give the module itself, and engine='ddp', or "
                "engine=partial(DistributedDataParallel, find_unused_parameters=True)"
            )
        trained = {name: p for name, p in parameters(self).items() if p.requires_grad}
        if not trained:
            raise UserError("Problem's model has no parameters that need a gradient: there is nothing to audit")
        for name, p in trained.items():
            if p.device.type != "cpu":
                raise UserError(
                    f"the parameter {name} is on {p.device}; the audit runs on CPU processes: build it on the CPU"
                )
            if p.dtype.is_complex:
                raise UserError(f"the parameter {name} is {p.dtype}: the audit is of real numbers")
            if p.dtype not in (torch.float64, torch.float32):
                raise UserError(
                    f"the parameter {name} is {p.dtype}, whose rounding would hide mistakes: build the model "
                    "in float32; the audit runs it in float64"
                )
        num_rows(self.batch)
        for function in (self.loss, self.step):
            check_known(self, _learned_in(function))


def check_known(problem: Problem, learned: Iterable[Tensor]) -> None:
    """Raise UserError if a learned tensor of the loss is not among the model's parameters."""
    known = {id(p) for p in parameters(problem).values()}
    for p in learned:
        if id(p) not in known:
            raise UserError(
                f"the loss has something learned, of shape {tuple(p.shape)}, that is not among the model's parameters: "
                "put it into Problem's model, as in ModuleDict(model=..., loss=...), where an engine finds it"
            )


def _learned_in(function: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the parameters that a function holds: in its closure, its bound object, or the arguments of a partial."""
    if isinstance(function, nn.Module):
        yield from (p for p in function.parameters() if p.requires_grad)
    elif isinstance(function, Tensor):
        if function.requires_grad and function.is_leaf:
            yield function
    elif depth:
        held: list[Any] = [getattr(function, "__self__", None)]
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # not filled yet
                held.append(cell.cell_contents)
        if isinstance(function, partial):
            held += [function.func, *function.args, *function.keywords.values()]
        for value in held:
            if callable(value) or isinstance(value, Tensor):
                yield from _learned_in(value, depth - 1)


def modules(problem: Problem) -> list[nn.Module]:
    """Return the model, and the loss or step if it is a module."""
    return [module for module in (problem.model, problem.loss, problem.step) if isinstance(module, nn.Module)]


def parameters(problem: Problem) -> dict[str, nn.Parameter]:
    """Return all parameters by name: the model's, and as `loss. ...` those of a loss that is a module."""
    named = dict(problem.model.named_parameters())
    ids = {id(p) for p in named.values()}
    for function in (problem.loss, problem.step):
        if isinstance(function, nn.Module):
            named |= {f"loss.{name}": p for name, p in function.named_parameters() if id(p) not in ids}
    return named


def sharded_names(problem: Problem) -> list[str]:
    """Return the names of the parameters of which each rank holds a part."""
    heads = [m for module in modules(problem) for m in module.modules() if isinstance(m, PartialFC)]
    head_ids = {id(p) for head in heads for p in head.parameters()}
    return [
        name for name, p in parameters(problem).items() if id(p) in head_ids or name.startswith(tuple(problem.sharded))
    ]
