"""even=True: the facts of a call by promise. The host reads nothing, and checks the promise at the next call.

A handshake makes the host wait once in a call, until the GPU has finished the encoders; nothing is queued behind them
then. Callers can promise instead that a call is like the one before: on all ranks as many rows, and the same options.

    first call        a whole handshake, whose facts are kept; so is every call that is not like the one before
    a call like it    the ranks gather their records, and judge them on the device: ok or not; the host goes on
    the next call     reads these records, which have arrived by then, and raises on all ranks if they were not ok

If a call is not ok, its loss is NaN on all ranks and its gradients are 0: a broken promise costs one step at most. A
rank that notices that its own rows are more or fewer takes part with rows of zeros instead, so that no rank waits. A
rank with other options raises at once, alone: the others wait for it until the timeout.

Two numbers that a loss needs on the host are not known there. The scale multiplies the rows of X on the device,
S = (scale X) Y^T, in float32. The bound of logits, from which their shift follows, is assumed from the last call that
was read, L = |scale| max|x| max|y| with norms of at least 1 (see `wholebatch.logsumexp`):

    L <= 66                     L <= 70: no logit is shifted, and no sum underflows
    rows with norms <= 1.01     norms and scale grow by less than 2 %; an underflow is found on the device: not ok
    else                        the call reads, with a whole handshake

Finite numbers above these bounds are no mistake: the next call warns, and reads.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._autograd import once_differentiable
from .._precision import accumulation_dtype
from .._products import inner
from .._tensor_file import bytes_of
from ..comm.facts_by_rank import FactsByRank
from ..comm.handshake import Unread
from ..comm.records import OnDevice, Records, numbers_on_device
from ..comm.transport import Transport
from ..partition import Partition
from .backward import CALL, EARLIER, check_earlier
from .canaries import CANARIES, canaries_of
from .inputs import SMALLEST_WEIGHT, SUM_OF_WEIGHTS, Inputs, norm_of

NUMBERS = "numbers"  # the fact with the numbers of a rank
_NO_SHIFT, _NEAR_IT = 70.0, 66.0
_UNIT, _GROWS = 1.01, 1.02
_TOLERANCE = 1e-5  # relative, of a scalar between ranks
_LARGEST = torch.finfo(torch.float32).max

Limits = Mapping[str, tuple[float, float]]  # the lowest and highest accepted value of each number


@dataclass
class Promise:
    """The facts of a caller's last calls, which its next one keeps to.

    Args:
        form: this rank's facts, but for numbers on the device and the number of the call.
        by_rank: the facts of all ranks.
        rows: for each matrix of features, the rows that each rank holds.
        call: the number of the last call.
        norms: for each matrix of features, the largest norm of a row on any rank in the last call that was read.
        scalars: the scalars of that call.
    """

    form: Mapping[str, Any]
    by_rank: FactsByRank
    rows: Mapping[str, Partition]
    call: int
    norms: Mapping[str, float]
    scalars: Mapping[str, float]

    def assumed(self, inputs: Inputs) -> tuple[dict[str, float], float] | None:
        """Return upper bounds of norms, by name, and of |scale|; None if the host has to read the numbers."""
        scale = max(1.0, abs(self.scalars[inputs.scales[0]])) if inputs.scales else 1.0
        norms = {name: max(1.0, norm) for name, norm in self.norms.items()}
        largest = scale
        for norm in norms.values():
            largest *= norm
        if largest <= _NEAR_IT:
            grows = (_NO_SHIFT / largest) ** (1 / (1 + len(norms)))
        elif max(norms.values()) <= _UNIT:
            grows = _GROWS
        else:
            return None
        return {name: grows * norm for name, norm in norms.items()}, grows * scale


_PROMISES, _UNREAD = "promises by caller", "calls whose records the host has not read"  # kept with a group


def form_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's facts without those that change from call to call."""
    numbers = {
        name: None if isinstance(value, OnDevice) else value
        for name, value in facts[NUMBERS].items()
        if name not in (EARLIER, *CANARIES)  # of earlier calls
    }
    return {**facts, NUMBERS: numbers, CALL: None}


def promised(transport: Transport, caller: str) -> Promise | None:
    """Return the promise of a caller; None at its first call."""
    promise: Promise | None = transport.kept.get(_PROMISES, {}).get(caller)
    return promise


def keep(transport: Transport, caller: str, promise: Promise) -> None:
    """Keep the facts of a call that has read them.

    Raises:
        ValueError: if ranks hold different numbers of rows, or differ in another fact, on all ranks.
    """
    forget(transport, caller)
    for name in promise.form:
        values = promise.by_rank.differing(name) if name not in (CALL, NUMBERS) else None
        if values is not None:
            if name == "rows":
                values = [of_rank[next(iter(of_rank))] for of_rank in values]
            raise ValueError(
                f"{caller}: even=True promises that all ranks pass the same number of rows and the same options, got "
                f"{name} {values}; pass even=False, or drop the last rows of an epoch"
            )
    transport.kept.setdefault(_PROMISES, {})[caller] = promise


def forget(transport: Transport, caller: str | None = None) -> None:
    """Forget the promise of a caller, or of all callers of a group."""
    promises = transport.kept.get(_PROMISES, {})
    for name in [*promises] if caller is None else [caller]:
        promises.pop(name, None)


def unread(transport: Transport) -> list[Late]:
    """Return the calls of a group whose records the host has not read."""
    calls: list[Late] = transport.kept.setdefault(_UNREAD, [])
    return calls


class Late:
    """A call whose facts the host has not read.

    Args:
        caller: the loss.
        unread: the records of all ranks.
        limits: of the numbers in them.
        scalars: the names of those that are the same on all ranks.

    Attributes:
        ok: whether the promise has held so far, () on the device of `to`.
    """

    def __init__(self, caller: str, unread: Unread, limits: Limits, scalars: Sequence[str], to: torch.device) -> None:
        self.caller, self.unread, self.limits, self.scalars = caller, unread, limits, scalars
        self.ok = self._judged().to(to, non_blocking=True)
        self._words = self._found = unread.words
        self._arrived: torch.cuda.Event | None = None

    def _judged(self) -> Tensor:
        """Return whether all ranks sent the same facts, and numbers within their limits, () on their device."""
        numbers, ok = numbers_on_device(self.unread.words, len(self.limits))
        low, high = _to_device([*self.limits.values()], numbers.device).unbind(1)
        ok = ok & (((numbers >= low) & (numbers <= high)) | low.isneginf()).all()
        column = dict(zip(self.limits, numbers.unbind(1), strict=True))
        for name in self.scalars:
            ok = ok & ((column[name] - column[name][0]).abs() <= _TOLERANCE * column[name][0].abs()).all()
        return ok & (column[SUM_OF_WEIGHTS].sum() > 0) if SUM_OF_WEIGHTS in column else ok

    def require(self, holds: Tensor) -> None:
        """Require a further condition, () on the device, which is the same on all ranks."""
        self.ok = self.ok & holds

    def admit(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        """Return x, multiplied by the scale, if given; 0 where the promise is broken, and so is its gradient."""
        return _Admit.apply(self, x, scale)

    def finish(self, loss: Tensor, transport: Transport) -> Tensor:
        """Return the loss, NaN if the promise is broken, and let the records travel to the host."""
        self._words, self._found = _to_host(self.unread.words), _to_host(self.ok)
        if self.ok.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        unread(transport).append(self)
        return torch.where(self.ok, loss, math.nan)

    def read(self, transport: Transport) -> None:
        """Read the records, and let the promise follow the numbers.

        Raises:
            ValueError: if the promise was broken, on all ranks.
        """
        if self._arrived is not None:
            self._arrived.synchronize()  # of an earlier call, with a backward pass between
        facts = self.unread.facts(self._words.contiguous())
        columns = facts.columns_of_mapping(NUMBERS)
        assert columns is not None
        if not any(bytes_of(self._found)):
            forget(transport)
            mistake = self._mistake(facts, columns)
            if mistake is not None:
                raise ValueError(
                    f"{self.caller}: in an earlier call the promise of even=True was broken: {mistake}. The loss of "
                    "that step is NaN, and its gradients are 0. even=True promises that a call is like the one before: "
                    "as many rows on each rank, the same options, and finite features; pass even=False where this "
                    "does not hold"
                )
            warnings.warn(
                f"{self.caller}: with even=True, {self._growth(columns)}. The loss of that step is NaN, and its "
                "gradients are 0; this call reads the numbers again",
                stacklevel=2,
            )
        if any(columns.get(EARLIER, ())):
            check_earlier(transport, {EARLIER: 1.0})
        canaries_of(transport).judge(columns)
        promise = promised(transport, self.caller)
        if promise is not None:
            promise.norms = {name: max(columns[norm_of(name)]) for name in promise.norms}
            promise.scalars = {name: columns[name][0] for name in promise.scalars}

    def _mistake(self, facts: FactsByRank, columns: Mapping[str, Sequence[float]]) -> str | None:
        """Return what broke the promise, the same on all ranks; None if numbers only grew beyond their bounds."""
        records = Records(self._words.contiguous())
        odd = [rank for rank in range(len(facts)) if rank not in records.unread()]
        if odd:
            rows = "; ".join(f"{name}: {facts.column('rows', name)}" for name in facts[0]["rows"])
            return f"rank {', '.join(map(str, odd))} passed other rows than before ({rows})"
        for name in self.limits:
            wrong = [rank for rank, x in enumerate(columns[name]) if not math.isfinite(x)]
            if wrong and self.limits[name][0] != -math.inf:
                return f"{name} of rank {wrong[0]} was {columns[name][wrong[0]]}; check for an overflow"
        for name in self.scalars:
            if max(columns[name]) - min(columns[name]) > _TOLERANCE * abs(columns[name][0]):
                return f"{name} must be the same on all ranks, got {columns[name]}"
        if min(columns.get(SMALLEST_WEIGHT, [0.0])) < 0:
            return f"weights must not be negative, got {min(columns[SMALLEST_WEIGHT])}"
        if sum(columns.get(SUM_OF_WEIGHTS, [1.0])) <= 0:
            return "weights were 0 for every example of every rank"
        return None if self._grown(columns) else "all logits of a row were so low that their sum underflowed"

    def _grown(self, columns: Mapping[str, Sequence[float]]) -> list[str]:
        """Return the names of numbers that lie beyond their bounds on any rank."""
        return [name for name, (low, high) in self.limits.items() if not all(low <= x <= high for x in columns[name])]

    def _growth(self, columns: Mapping[str, Sequence[float]]) -> str:
        """Return a number that grew beyond its bounds, in words."""
        name = self._grown(columns)[0]
        return (
            f"{name} grew to {max(map(abs, columns[name])):.6g} in a call, and {self.limits[name][1]:.6g} was assumed"
        )


def read_late(transport: Transport) -> None:
    """Read what earlier calls of a group have left unread; ValueError, on all ranks, for a broken promise."""
    for late in transport.kept.pop(_UNREAD, []):
        late.read(transport)


def limits_of(
    inputs: Inputs, numbers: Mapping[str, Tensor | float], norms: Mapping[str, float], scale: float
) -> Limits:
    """Return the limits of the numbers on the device, in the order of a record.

    Args:
        inputs: of the call.
        numbers: those that this rank sends.
        norms: upper bounds of norms, by the name of the features.
        scale: upper bound of the scale's absolute value.
    """
    limits: dict[str, tuple[float, float]] = {}
    for name, value in numbers.items():
        if isinstance(value, Tensor):
            limits[name] = (-math.inf, math.inf)  # not judged here
            if name in inputs.given_scalars:
                most = scale if name in inputs.scales else _LARGEST
                limits[name] = (-most, most)
    limits |= {norm_of(name): (0.0, norms[name]) for name in inputs.given_features}
    of_weights = {name: (0.0, _LARGEST) for name in (SUM_OF_WEIGHTS, SMALLEST_WEIGHT) if name in limits}
    return limits | of_weights


@dataclass(frozen=True)
class StandIns:
    """Tensors of the promised shapes, for a rank whose own have other shapes."""

    inputs: Inputs
    rows: Mapping[str, int]

    def differentiable(self) -> dict[str, Any]:
        """Return the arguments that may need a gradient: zeros for features and ones for weights, with gradient 0."""
        given = dict(self.inputs.differentiable)
        for name, x in self.inputs.given_features.items():
            given[name] = _StandIn.apply(x, (self.rows[name], x.shape[1]), 0.0)
        weights, of = self.inputs.weights
        if weights is not None:
            given["weights"] = _StandIn.apply(weights, (self.rows[of],), 1.0)
        return given

    def ids(self) -> dict[str, tuple[Any, str]]:
        """Return ids of 0."""
        return {name: (x.new_zeros(self.rows[of]), of) for name, (x, of) in self.inputs.given_ids.items()}


def _to_host(x: Tensor) -> Tensor:
    """Return a copy on the host, for which nothing waits: pinned memory that a GPU fills in its own time."""
    if not x.is_cuda:
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _to_device(rows: Sequence[Sequence[float]], device: torch.device) -> Tensor:
    """Return numbers on a device, for which nothing waits."""
    made = torch.tensor(rows, dtype=torch.float64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


class _Admit(Function):
    """scale x where the promise holds, else 0; the scale's gradient is <x, g>, summed in float64."""

    @staticmethod
    def forward(ctx: Any, late: Late, x: Tensor, scale: Tensor | None) -> Tensor:
        ctx.late, ctx.dtype = late, x.dtype
        ctx.save_for_backward(x if scale is not None and scale.requires_grad else None, scale)
        if scale is not None:
            dtype = accumulation_dtype(x.dtype)
            x = x.to(dtype) * scale.to(dtype).view(())
        return torch.where(late.ok, x, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, scale = ctx.saved_tensors
        grad = torch.where(ctx.late.ok, grad, 0.0)  # what was required after this node counts as well
        of_scale = None
        if ctx.needs_input_grad[2]:
            of_scale = torch.where(ctx.late.ok, inner(x, grad), 0.0).to(scale).view_as(scale)
        if scale is not None:
            grad = (grad * scale.to(grad.dtype).view(())).to(ctx.dtype)
        return None, grad if ctx.needs_input_grad[1] else None, of_scale


class _StandIn(Function):
    """A constant matrix instead of one of another shape."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], value: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_full(shape, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        return torch.zeros_like(x), None, None
