"""The door that all losses share: every rank's arguments are sound and agree, or every rank raises.

It also sees to it that all ranks enter the backward pass together. A rank whose own inputs need no gradient (a frozen
tower, a rank without rows) would build no graph, never call the collectives of the backward pass, and leave the others
waiting. So inputs that need a gradient on any rank need one on all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._checks import (
    check_alike,
    check_choice,
    check_features,
    check_flag,
    check_ids,
    check_memory,
    check_norm,
    check_not_negative,
    check_one,
    check_positive,
    check_value,
    check_weights,
    norm_bound,
    on_host,
)
from .._graph_break import outside_graphs
from .._normalize import LONGEST
from .._precision import accumulation_dtype, wide_dtype
from ..comm import Communicator, Group, LocalCommunicator, select_communicator
from ..comm.binding import CallError, bound, complaint
from ..comm.handshake import GRAD_ENABLED
from ..comm.select import check_group
from ..exchange import EXCHANGES, Exchange, ExchangeName, columns_of_a_chunk, num_entries, select_exchange
from ..kernels import KERNELS, Kernel, check_kernel, in_triton
from ..partition import Partition
from ..sweep import Budget, Memory, default_side, fit, side_of_tiles, smallest_budget
from ..sync import Sync, check_sync, feature_factor, loss_parameters, scale_gradient, total
from ._backward import CALL, check_earlier, differed, latest_call, number_call, together
from ._joining import gradient_facts, join
from ._towers import no_autocast, paired_products

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")
_CHOICES = ("exchange", "memory", "reduction", "kernel")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
_WEIGHT, _LEAST_WEIGHT, LEAST = "weight", "least weight", "least product"
_TOLERANCE = 1e-5  # of a scalar between ranks, relative: parameters that engines keep equal differ by rounding at most


@dataclass(frozen=True)
class Options:
    """What every loss lets its caller choose."""

    group: Group
    sync: Sync
    exchange: ExchangeName = "auto"
    memory: Memory = "auto"
    reduction: Reduction = "mean"
    kernel: Kernel = "auto"

    def check(self) -> None:
        """Raise ValueError unless each of them exists; `group` is looked at when the loss is called."""
        check_sync(self.sync)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_memory(self.memory)
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("kernel", self.kernel, KERNELS)


class LossModule(nn.Module):
    """A module that holds a loss's settings, checked when it is made; its `forward` calls the function with them."""

    def __init__(self, *, group: Group, sync: Sync, **settings: Any) -> None:
        super().__init__()
        check_group(group)
        Options(group, sync, **{name: settings[name] for name in _CHOICES if name in settings}).check()
        if "return_statistics" in settings:
            check_flag("return_statistics", settings["return_statistics"])
        self._names = ("group", "sync", *settings)
        for name, value in zip(self._names, (group, sync, *settings.values()), strict=True):
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of every call."""
        return {name: getattr(self, name) for name in self._names}

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.settings.items() if name != "group"}
        return ", ".join(f"{name}={_shown(value)}" for name, value in shown.items())


def _shown(value: object) -> str:
    return f"{value.item():g}" if isinstance(value, Tensor) and value.numel() == 1 else repr(value)


@dataclass(frozen=True)
class Agreement:
    """What each rank knows of all ranks' arguments."""

    caller: str
    call: int  # its number, the same on all ranks
    options: Options
    comm: Communicator
    scalars: dict[str, float]
    rows: dict[str, Partition]  # of each matrix of features
    norms: dict[str, float]  # the largest of all rows of all ranks
    least: float  # of the products of rows that match, of all ranks
    inputs: dict[str, Any]  # scalars, features and weights; those that need a gradient on any rank need one here
    vectors: dict[str, tuple[Tensor, str]]  # ids, with the features that they belong to
    everyone: list[Any]  # what each rank told the others
    width: int
    given_dtype: torch.dtype  # of the features as they came in
    features_dtype: torch.dtype  # of the features as they are taken
    dtype: torch.dtype  # in which sums are taken
    device: torch.device

    @property
    def differentiable(self) -> bool:
        """Whether a backward pass may follow."""
        inputs = self.inputs.values()
        return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.comm.rank

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of what the caller gets."""
        return accumulation_dtype(self.given_dtype)

    def in_range(self, *norms: float) -> Agreement:
        """The same; with features in float64 if some of all ranks are so long that float32 has no room for products.

        Args:
            norms: the largest of other rows of all ranks that take part.
        """
        wide = wide_dtype(self.device)
        if self.dtype == wide or max([*self.norms.values(), *norms]) <= LONGEST[self.dtype]:
            return self
        return replace(self, features_dtype=wide, dtype=wide).widened()

    def widened(self) -> Agreement:
        """The same, with features in the accumulation dtype: gradients of several uses meet there, to be rounded once.

        They are still multiplied in the dtype that they had, where `softmax_numbers` is told `narrow`.
        """
        return replace(self, inputs={n: x.to(self.dtype) if n in self.rows else x for n, x in self.inputs.items()})

    def facts(self, name: str) -> list[Any]:
        """What each rank told the others about `name`."""
        return [facts[name] for facts in self.everyone]

    def ids(self, name: str) -> Tensor:
        """The ids of all ranks' rows, (B,). Collective: one all-gather of integers."""
        ids, of = self.vectors[name]
        return self.gathered(ids.to(self.device, torch.int64), self.rows[of])

    @torch.no_grad()
    def gathered(self, numbers: Tensor, rows: Partition) -> Tensor:
        """All ranks' numbers, without gradient: (n_r, ...) -> (n, ...). Collective: one all-gather."""
        if self.comm.size == 1:
            return numbers.detach()
        return self.comm.all_gather(numbers, counts=rows.counts, check=False)

    def exchange(
        self,
        stays: Partition,
        travels: Partition,
        *,
        symmetric: bool = False,
        keep: bool = True,
        exact: bool = False,
        everywhere: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Exchange, Budget]:
        """The exchange that was asked for, and what this rank's sweep may allocate.

        Args:
            stays: whose rows X's are.
            travels: whose rows Y's are.
            symmetric: whether they are the same, and half of S suffices.
            keep: whether exp(S) may be kept.
            exact: whether what is kept must not be rounded.
            everywhere: whether every rank holds all of Y, and nothing has to travel.
            dtype: of the sweep, if it is not `self.dtype`.

        Raises:
            ValueError: on every rank, if a rank's `memory` is too little for its part.
        """
        side, dtype = default_side(self.device), dtype or self.dtype
        for rank, memory in enumerate(self.facts("memory")):
            needed = smallest_budget(stays.counts[rank], travels.total, dtype)
            if isinstance(memory, int) and memory < needed:
                raise ValueError(
                    f"{self.caller}: memory must be at least {needed} bytes for the smallest tiles of rank {rank}, got "
                    f"{memory}; 'flat' takes what it needs, at most {2 * side * side * dtype.itemsize} bytes"
                )
        exchange = select_exchange(
            self.options.exchange,
            LocalCommunicator() if everywhere else self.comm,
            stays.counts[self.rank],
            travels,
            row_bytes=self.width * dtype.itemsize,
            symmetric=symmetric,
            chunk=columns_of_a_chunk(travels.total, side, self.device),
        )
        of_tile = side_of_tiles(side, self.features_dtype) if in_triton(self.options.kernel) else side
        entries = num_entries(exchange.visits, of_tile) if keep else 0
        return exchange, fit(self.options.memory, entries=entries, side=side, dtype=dtype, exact=exact)

    def reduce(self, losses: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
        """What the caller asked for, from the losses (b_r,) of this rank's rows.

        Args:
            losses: of rows that do not count, 0.
            count: how many rows of all ranks count.
            counted: (b_r,), which of this rank's do; None: all.
        """
        weights = self.inputs["weights"]
        if weights is not None:
            losses = weights.to(losses) * losses
        if self.options.reduction == "none":
            return self.result(losses, one_loss=False)
        return self.total_of(losses.sum(), count, counted)

    def total_of(self, share: Tensor, count: int | Tensor, counted: Tensor | None = None) -> Tensor:
        """The same, from this rank's weighted sum. Collective: one all-reduce of a number, two with weights."""
        loss, weights = total(self.comm, share), self.inputs["weights"]
        if self.options.reduction == "mean" and weights is None:
            loss = loss / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))
        elif self.options.reduction == "mean":
            weights = weights.to(loss) if counted is None else weights.to(loss) * counted
            weight = total(self.comm, weights.sum())
            loss = torch.where(weight > 0, loss / weight.clamp(min=torch.finfo(loss.dtype).tiny), 0.0)
        return self.result(loss)

    def result(self, loss: Tensor, *, one_loss: bool = True) -> Tensor:
        """The loss as it leaves: its backward pass begins with a comparison between the ranks, see `together`."""
        return together(loss.to(self.loss_dtype), self.comm, self.caller, self.call, one_loss=one_loss)


def eager(loss: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: a compiled training step leaves its graph for the loss, whose handshake no graph can hold.

    And autocast is off inside: what a loss makes of its numbers needs their precision. Arguments that do not fit the
    signature are an error on every rank.
    """
    call = no_autocast(told_to_all(loss))
    return outside_graphs(call, "wholebatch's losses run outside the compiled graph")


def told_to_all(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator of what is collective over its `group`, or a module's: its signature is bound inside a handshake."""
    return bound(function, lambda error, args, kwargs: _refuse(function.__qualname__, error, args, kwargs))


def _refuse(caller: str, error: CallError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise, on all ranks of the group that was given, an error about arguments that do not fit a signature."""
    module = next((x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)), None)
    options = getattr(module, "options", module)
    try:
        comm = select_communicator(kwargs.get("group", getattr(options, "group", None)))
    except ValueError:  # no group: there is nobody to tell
        return
    comm.handshake(complaint(error), caller=caller)


def agree(
    caller: str,
    options: Options,
    *,
    scalars: Mapping[str, Tensor | float | None],
    features: Mapping[str, Tensor | None],
    paired: tuple[str, str] | None = None,
    matching: tuple[str, str] | None = None,
    positive: Sequence[str] = (),
    optional: Sequence[str] = (),
    ids: Mapping[str, tuple[Tensor | None, str]] | None = None,
    required: Sequence[str] = (),
    weights: tuple[Tensor | None, str] = (None, ""),
    check: Callable[[], Mapping[str, Any]] = dict,
    see: Callable[[], Mapping[str, Tensor]] = dict,
    judge: Callable[[Mapping[str, float]], Mapping[str, Any]] = lambda _: {},
    must_match: Sequence[str] = (),
) -> Agreement:
    """Make sure that every rank's arguments are sound and that they agree. Collective: one handshake.

    Args:
        caller: the loss, for messages.
        options: of the caller's.
        scalars: numbers that are the same on all ranks.
        features: matrices of the same width, dtype and device, the first of which has the batch's rows.
        paired: names of two of them that have the same rows.
        matching: names of two of them whose rows, as many as both have, are each other's positives.
        positive: names of scalars that have to be, temperatures.
        optional: names of scalars and features that may be None.
        ids: integer vectors that may be None, each with the name of the features whose rows it numbers.
        required: names of those that may not.
        weights: of examples, or None; and the name of the features whose rows they weigh.
        check: looks at what else there is, and returns facts about it.
        see: what else of the tensors is to be known, numbers of shape () by name, LEAST in the place of what `matching`
            says;
        judge: and facts, given them.
        must_match: names of such facts that have to be the same on all ranks.

    Raises:
        ValueError: on every rank, whichever rank made the mistake.
    """
    comm = select_communicator(options.group)
    inputs = {**scalars, **features, "weights": weights[0]}
    given: dict[str, Any] = {name: x for name, x in features.items() if x is not None or name not in optional}
    numbers: dict[str, Any] = {name: x for name, x in scalars.items() if x is not None or name not in optional}
    numbering: dict[str, tuple[Any, str]] = {
        name: (x, of) for name, (x, of) in (ids or {}).items() if x is not None or name in required
    }

    def state() -> dict[str, Any]:
        options.check()
        for name, x in given.items():
            check_features(name, x)
        first_name, first = next(iter(given.items()))
        check_kernel(options.kernel, first.device)
        for name, x in given.items():
            check_alike(first_name, first, name, x, rows=(first_name, name) == paired)
        more = check()
        for name, (x, of) in numbering.items():
            check_ids(name, x, of, len(given[of]))
        if weights[0] is not None:
            check_weights("weights", weights[0], weights[1], len(given[weights[1]]))
        for name, value in numbers.items():
            check_one(name, value)
        # All that is to be known of what lies on a GPU, in one look.
        seen = on_host({**_to_be_seen(given, numbers, weights[0], matching), **see(), **differed(comm.transport)})
        check_earlier(comm.transport, seen)
        norms = {name: check_norm(name, x, seen[_norm(name)]) for name, x in given.items()}
        values = {name: check_value(name, seen.get(name, value)) for name, value in numbers.items()}
        for name in positive:
            check_positive(name, values[name])
        weight = None
        if weights[0] is not None:
            weight = check_not_negative("weights", weights[0], seen[_LEAST_WEIGHT], seen[_WEIGHT])
        return {
            _ARGUMENTS: [*numbers, *given, *numbering, *["weights"] * (weights[0] is not None)],
            "rows": {name: len(x) for name, x in given.items()},
            "norms": norms,
            LEAST: seen.get(LEAST, float("-inf")),
            "feature size": first.shape[1],
            "dtype": str(first.dtype),
            "device type": first.device.type,
            "scalars": {name: float(value) for name, value in values.items()},
            "weight": weight,
            "sync": options.sync,
            "exchange": options.exchange,
            "memory": options.memory,
            "reduction": options.reduction,
            CALL: latest_call(),
            **more,
            **judge(seen),
            **gradient_facts([*inputs.values()]),
        }

    names = (
        *(_ARGUMENTS, "feature size", "dtype", "device type", "sync", "exchange", "reduction"),
        *must_match,
        GRAD_ENABLED,
    )
    everyone = comm.handshake(state, caller=caller, must_match=names)
    rows = {name: Partition(tuple(facts["rows"][name] for facts in everyone)) for name in given}
    first_name, first = next(iter(given.items()))
    if rows[first_name].total == 0:
        raise ValueError(f"{caller}: the global batch is empty, every rank passed 0 rows")
    by_rank = {name: [facts["scalars"][name] for facts in everyone] for name in numbers}
    for name, values in by_rank.items():
        _check_equal(caller, name, values)
    if weights[0] is not None and not any(facts["weight"] for facts in everyone):
        raise ValueError(f"{caller}: weights must not be 0 for every example of every rank: no loss would be left")
    return Agreement(
        caller,
        number_call([facts[CALL] for facts in everyone]),
        options,
        comm,
        {name: values[0] for name, values in by_rank.items()},
        rows,
        {name: max(facts["norms"][name] for facts in everyone) for name in given},
        min(facts[LEAST] for facts in everyone),
        _entering(dict(zip(inputs, join([*inputs.values()], everyone), strict=True)), scalars, comm, options),
        numbering,
        everyone,
        first.shape[1],
        first.dtype,
        first.dtype,
        accumulation_dtype(first.dtype),
        first.device,
    ).in_range()


def _to_be_seen(
    features: Mapping[str, Tensor],
    scalars: Mapping[str, Tensor | float],
    weights: Tensor | None,
    matching: tuple[str, str] | None,
) -> dict[str, Tensor]:
    """Numbers, shape () or [1], that the door looks at."""
    seen = {_norm(name): norm_bound(x) for name, x in features.items()}
    seen |= {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
    if weights is not None:
        of = weights.detach().to(wide_dtype(weights.device))
        seen |= {_WEIGHT: of.sum(), _LEAST_WEIGHT: of.amin() if len(of) else of.sum()}
    if matching is not None:
        x, y = (features[name] for name in matching)
        rows = min(len(x), len(y))
        products = paired_products(x[:rows], y[:rows])
        seen[LEAST] = products.amin() if rows else products.new_full((), float("inf"))
    return seen


def _norm(name: str) -> str:
    return f"largest norm of {name}"


def _entering(
    inputs: dict[str, Any], scalars: Mapping[str, Any], comm: Communicator, options: Options
) -> dict[str, Any]:
    """The inputs, whose gradients take on what `sync` asks for on their way out. This is the one place for that.

    With reduction "none" every rank has losses of its own and makes a scalar of them; the engine then averages or adds
    the gradients of these, as it always does, and nothing is to be done here.

    Scalars and weights are widened, whatever they come in: losses are made of few numbers, all of them float64, and the
    gradients by a weight of what it adds to the sum and to the mean's divisor all but cancel.
    """
    inputs = {name: _widened(x) if name in scalars or name == "weights" else x for name, x in inputs.items()}
    if options.reduction == "none":
        return inputs
    parameters = loss_parameters([inputs[name] for name in scalars], comm, options.sync)
    factor = feature_factor(options.sync, comm.size)
    entering = {
        name: scale_gradient(x, factor) if isinstance(x, Tensor) and x.requires_grad else x
        for name, x in inputs.items()
        if name not in scalars
    }
    return dict(zip(scalars, parameters, strict=True)) | entering


def _widened(scalar: Any) -> Any:
    return scalar.to(wide_dtype(scalar.device)) if isinstance(scalar, Tensor) else scalar


def _check_equal(caller: str, name: str, values: Sequence[float]) -> None:
    if max(values) - min(values) > _TOLERANCE * abs(values[0]):
        raise ValueError(
            f"{caller}: {name} must be the same on all ranks, got {values}; give all ranks the same initial "
            "parameters, and let the engine average its gradient like any other's"
        )
