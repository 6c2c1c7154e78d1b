"""One handshake at the entry of a loss: every rank's arguments are valid and fit together, or every rank raises.

1. each rank checks shapes, types and settings          no device is read
2. each rank computes the numbers that values need      norms, scalars: they stay on the device
3. all ranks send facts and numbers in one handshake    the host waits once, for the numbers of all ranks
4. each rank checks the numbers and facts of all ranks  the same numbers, hence the same decision, on all
                                                        with even=True at the next call, see `even`
5. the inputs enter the graph of the loss               see `gradients`

If a number of any rank looks wrong in step 4 (NaN, an infinite norm, a negative weight), or ranks differ in a fact that
must match, all ranks make a second handshake. For this each checks its own values, and reads whatever its error message
needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import on_host
from .._precision import accumulation_dtype
from ..comm import Communicator, select_communicator
from ..comm.facts_by_rank import FactsByRank
from ..comm.handshake import GRAD_ENABLED, Unread, UnreadError, different_facts, handshake_unread, on_all_ranks
from ..comm.records import OnDevice
from ..kernels import check_kernel, choice, chooses, interpreted, missing
from ..partition import Partition
from ..sweep import Products, select_products
from .autocast import autocast_around
from .backward import CALL, EARLIER, call_after, check_earlier, differed, latest_call, number_call
from .canaries import CANARIES, canaries_of
from .even import NUMBERS, Late, Promise, StandIns, form_of, keep, limits_of, promised, read_late
from .facts import Facts
from .gradients import enter, gradient_facts, join
from .inputs import MIN_PAIR_PRODUCT, SUM_OF_WEIGHTS, Checks, Inputs, norm_of
from .options import Options

_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
PRECISION = "precision of products"  # the one that was chosen
_NO_KERNELS, _CHOOSES = "kernels are missing", "auto chooses kernels"  # why, or ""; on the device of this rank
_CHOICES = "choices of kernels"  # a digest of them
_MUST_MATCH = (
    _ARGUMENTS,
    "embedding size",
    "dtype",
    "device type",
    "sync",
    "exchange",
    "reduction",
    "kernel",
    "even",
    PRECISION,
)
_DERIVED = "derived"  # the fact that follows from the numbers of a rank
_TOLERANCE = 1e-5  # relative, of a scalar between ranks: parameters that engines keep equal differ only by rounding


def agree(caller: str, options: Options, inputs: Inputs, checks: Checks | None = None) -> Facts:
    """Return the facts on which the ranks agree. Collective: one handshake.

    Args:
        caller: the loss, for messages.
        options: the caller's options.
        inputs: its tensors and scalars.
        checks: further checks of the loss.

    Raises:
        ValueError: on every rank, whichever rank made the mistake.
    """
    call = _Call(caller, options, inputs, checks or Checks(), select_communicator(options.group))
    comm, checks = call.comm, call.checks
    read_late(comm.transport)
    promise = promised(comm.transport, caller) if options.even is True else None  # checked below
    if promise is not None and (facts := _as_promised(call, promise)) is not None:
        return facts
    local: dict[str, Any] = {}

    def facts_of_this_rank() -> dict[str, Any]:
        local.update(call.local_facts())
        return local

    try:
        by_rank = comm.handshake(facts_of_this_rank, caller=caller)
    except UnreadError as error:
        local = call.local_facts()  # raises this rank's own mistake, if there is one
        if promise is None or _but_rows(form_of(local)) != _but_rows(promise.form):
            raise
        return _by_promise(call, promise, error.sent, local)
    canaries_of(comm.transport).check(by_rank.columns_of_mapping(NUMBERS))
    mistake = different_facts(caller, by_rank, (*_MUST_MATCH, *checks.must_match, GRAD_ENABLED))
    values = None if mistake is not None else _values_of_all(by_rank, comm.rank, inputs, checks)
    if values is None:
        found = _numbers(comm, inputs, checks)
        checked = comm.handshake(lambda: _check_values(comm, found, inputs, checks), caller=caller)
        if mistake is not None:
            raise on_all_ranks(mistake, comm.transport)
        values = _Values.of(checked, inputs)
    check_earlier(comm.transport, {})
    rows = _partitions({name: tuple(by_rank.column("rows", name)) for name in inputs.given_features})
    if rows[inputs.first[0]].total == 0:
        raise ValueError(f"{caller}: the global batch is empty, every rank passed 0 rows; skip the step on all ranks")
    for name, of_ranks in values.scalars.items():
        _check_equal(caller, name, of_ranks)
    if inputs.weights[0] is not None and not any(values.weights):
        raise ValueError(
            f"{caller}: weights must not be 0 for every example of every rank; give at least one a positive weight"
        )
    number = number_call(by_rank.column(CALL))
    scalars = {name: of_ranks[0] for name, of_ranks in values.scalars.items()}
    norms = {name: max(of_ranks) for name, of_ranks in values.norms.items()}
    if options.even is True:
        keep(comm.transport, caller, Promise(form_of(local), by_rank, rows, number, norms, scalars))
    entered = call.entered(inputs.differentiable, by_rank)
    least = min(values.min_pair_products)
    return call.facts(by_rank.plus(values.derived), number, scalars, rows, norms, least, entered, inputs.given_ids)


def _as_promised(call: _Call, promise: Promise) -> Facts | None:
    """Return the facts of a call that is like the one before, without reading a device; None if it is not."""
    try:
        local = call.local_facts()
    except ValueError:  # raised again, on all ranks, by the whole handshake
        return None
    if form_of(local) != promise.form or promise.assumed(call.inputs) is None:
        return None
    sent = handshake_unread(call.comm.transport, {**local, CALL: 0}, caller=call.caller)
    canaries_of(call.comm.transport).clear()  # the records have taken them along
    check_earlier(call.comm.transport, {})
    return _by_promise(call, promise, sent, local)


def _by_promise(call: _Call, promise: Promise, sent: Unread, local: Mapping[str, Any]) -> Facts:
    """Return the facts of a call from the promise; features are 0 on the device where it is broken.

    Args:
        call: the call.
        promise: of the caller.
        sent: the records of all ranks.
        local: this rank's facts. If it has other rows than promised, zeros stand in for them.
    """
    inputs, assumed = call.inputs, promise.assumed(call.inputs)
    assert assumed is not None
    norms, scale = assumed
    numbers = {name: of.number if isinstance(of, OnDevice) else of for name, of in local[NUMBERS].items()}
    on_device = [name for name in inputs.given_scalars if isinstance(numbers[name], Tensor)]
    late = Late(call.caller, sent, limits_of(inputs, numbers, norms, scale), on_device, inputs.first[1].device)
    given, ids = inputs.differentiable, inputs.given_ids
    if local["rows"] != promise.form["rows"]:
        stand_ins = StandIns(inputs, promise.form["rows"])
        given, ids = stand_ins.differentiable(), stand_ins.ids()
    entered = call.entered(given, promise.by_rank)
    factor, scaled, scalars = None, "", dict(promise.scalars)
    if inputs.scales and inputs.scales[0] in on_device:
        name, scaled = inputs.scales
        factor = entered[name]
        scalars[name] = entered[name] = 1.0
        norms = {**norms, scaled: scale * norms[scaled]}
    for name in [*inputs.given_features, *(["weights"] if given["weights"] is not None else [])]:
        entered[name] = late.admit(entered[name], factor if name == scaled else None)
    promise.call = call_after(promise.call)
    facts = call.facts(promise.by_rank, promise.call, scalars, dict(promise.rows), norms, -math.inf, entered, ids, late)
    return facts.widened() if scaled else facts


def _but_rows(form: Mapping[str, Any]) -> dict[str, Any]:
    return {name: of for name, of in form.items() if name != "rows"}


@dataclass(frozen=True)
class _Call:
    """The arguments of one call, and the ranks that make it."""

    caller: str
    options: Options
    inputs: Inputs
    checks: Checks
    comm: Communicator

    def local_facts(self) -> dict[str, Any]:
        """Return this rank's facts, if its arguments are valid."""
        return _local_facts(self.comm, self.options, self.inputs, self.checks)

    def entered(self, given: Mapping[str, Any], by_rank: FactsByRank) -> dict[str, Any]:
        """Return the arguments in the graph of the loss, by name."""
        joined = join([*given.values()], by_rank)
        return enter(dict(zip(given, joined, strict=True)), self.inputs.replicated, self.comm, self.options)

    def facts(
        self,
        by_rank: FactsByRank,
        number: int,
        scalars: dict[str, float],
        rows: dict[str, Partition],
        norms: dict[str, float],
        min_pair_product: float,
        entered: dict[str, Any],
        ids: dict[str, tuple[Any, str]],
        late: Late | None = None,
    ) -> Facts:
        """Return the facts on which the ranks agree; the arguments are those of :class:`Facts`."""
        first = self.inputs.first[1]
        return Facts(
            caller=self.caller,
            call=number,
            options=self.options,
            comm=self.comm,
            scalars=scalars,
            rows=rows,
            norms=norms,
            min_pair_product=min_pair_product,
            inputs=entered,
            vectors=ids,
            by_rank=by_rank,
            embedding_size=first.shape[1],
            given_dtype=first.dtype,
            features_dtype=first.dtype,
            products=Products(by_rank.column(PRECISION)[0], named=self.options.precision != "auto"),
            dtype=accumulation_dtype(first.dtype),
            device=first.device,
            kernels=_may_use_kernels(self.comm, self.options, by_rank),
            late=late,
        ).in_range()


def _partitions(counts: Mapping[str, tuple[int, ...]]) -> dict[str, Partition]:
    """Return the partition of each name; equal ones are one object."""
    made = {of_ranks: Partition(of_ranks) for of_ranks in set(counts.values())}
    return {name: made[of_ranks] for name, of_ranks in counts.items()}


def _local_facts(comm: Communicator, options: Options, inputs: Inputs, checks: Checks) -> dict[str, Any]:
    """Return this rank's facts, if its arguments are valid."""
    options.check()
    inputs.check_features()
    first = inputs.first[1]
    comm.transport.use_device(first.device)
    check_kernel(options.kernel, first.device)
    products = select_products(options.precision, first.dtype, first.device, autocast_around(first.device))
    loss_facts = checks.check()
    inputs.check_rest()
    return {
        NUMBERS: {
            name: OnDevice(x) if isinstance(x, Tensor) else x for name, x in _numbers(comm, inputs, checks).items()
        },
        _ARGUMENTS: inputs.names,
        "rows": inputs.counts,
        "embedding size": first.shape[1],
        "dtype": str(first.dtype),
        "device type": first.device.type,
        "sync": options.sync,
        "exchange": options.exchange,
        "memory": options.memory,
        "reduction": options.reduction,
        "kernel": options.kernel,
        "even": options.even,
        PRECISION: products.precision,
        _NO_KERNELS: _why_not(first.device) if options.kernel == "auto" else "",
        _CHOOSES: chooses(first.device),
        _CHOICES: choice.digest(comm.transport.group_name),
        CALL: latest_call(),
        **loss_facts,
        **gradient_facts([*inputs.differentiable.values()]),
    }


def _why_not(device: torch.device) -> str:
    """Return why kernels cannot run on a GPU; "" if they can, and for a device on which nobody expects them."""
    return (missing(device) or "") if device.type == "cuda" or interpreted() else ""


def _may_use_kernels(comm: Communicator, options: Options, by_rank: FactsByRank) -> bool:
    """Return whether kernels may compute tiles, the same on all ranks."""
    if by_rank.differing(_CHOICES) is not None:  # a rank was started again, or was in another group of this name
        choice.forget(comm.transport.group_name)
    if options.kernel != "auto":
        return options.kernel == "triton"
    if not any(by_rank.column(_CHOOSES)):  # as on CPUs; where GPUs differ, the ranks still choose together
        return False
    why = by_rank.column(_NO_KERNELS)
    first = next((rank for rank, of_rank in enumerate(why) if of_rank), None)
    if first is not None and comm.rank == 0:
        choice.warn(f"kernel='triton' {why[first]} (rank {first})")
    return first is None


def _numbers(comm: Communicator, inputs: Inputs, checks: Checks) -> dict[str, Tensor | float]:
    """Return the numbers that the checks of values need, those of tensors on their device."""
    return {
        **inputs.numbers(),
        **checks.read_back(),
        **differed(comm.transport),
        **canaries_of(comm.transport).numbers(),
    }


@dataclass(frozen=True)
class _Values:
    """The facts that follow from numbers: lists of one value for each rank, by name."""

    norms: Mapping[str, Sequence[float]]
    scalars: Mapping[str, Sequence[float]]
    weights: Sequence[float | None]
    min_pair_products: Sequence[float]
    derived: Mapping[str, Sequence[Any]]

    @classmethod
    def of(cls, checked: FactsByRank, inputs: Inputs) -> _Values:
        """Return the facts that each rank has checked itself."""
        return cls(
            {name: checked.column("norms", name) for name in inputs.given_features},
            {name: checked.column("scalars", name) for name in inputs.compared},
            checked.column("weight"),
            checked.column(MIN_PAIR_PRODUCT),
            _by_name(checked.column(_DERIVED)),
        )


def _check_values(
    comm: Communicator, numbers: Mapping[str, Tensor | float], inputs: Inputs, checks: Checks
) -> dict[str, Any]:
    """Return the facts that follow from this rank's numbers, or raise ValueError for a value that is wrong."""
    found = on_host(numbers)
    check_earlier(comm.transport, found)
    return {**inputs.check_values(found), _DERIVED: checks.derive(found) if checks.derive is not None else {}}


def _values_of_all(by_rank: FactsByRank, rank: int, inputs: Inputs, checks: Checks) -> _Values | None:
    """Return the facts that follow from all ranks' numbers; None, on every rank, if a number may be wrong."""
    columns = by_rank.columns_of_mapping(NUMBERS)
    if columns is None or any(column[0] for name, column in columns.items() if name == EARLIER):
        return None
    finite = [column for name, column in columns.items() if name not in (MIN_PAIR_PRODUCT, *CANARIES)]
    if not all(math.isfinite(sum(column)) for column in finite):
        return None
    try:
        for extreme in (min, max):  # each check accepts an interval
            inputs.check_values({name: extreme(column) for name, column in columns.items()})
        derived: list[Mapping[str, Any]] = [{}] * len(by_rank)
        if checks.derive is not None:
            for at in sorted(range(len(by_rank)), key=lambda at: at == rank):  # this rank's last: it may keep numbers
                derived[at] = checks.derive({name: column[at] for name, column in columns.items()})
    except (ValueError, IndexError):  # raised again, with this rank's values in its message, by `_check_values`
        return None
    nothing = [float("-inf")] * len(by_rank)
    return _Values(
        {name: columns[norm_of(name)] for name in inputs.given_features},
        {name: columns[name] for name in inputs.compared},
        columns.get(SUM_OF_WEIGHTS, [None] * len(by_rank)),
        columns.get(MIN_PAIR_PRODUCT, nothing),
        _by_name(derived),
    )


def _by_name(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {name: [of_rank[name] for of_rank in of_ranks] for name in of_ranks[0]}


def _check_equal(caller: str, name: str, values: Sequence[float]) -> None:
    if max(values) - min(values) > _TOLERANCE * abs(values[0]):
        raise ValueError(
            f"{caller}: {name} must be the same on all ranks, got {values}; give all ranks the same initial "
            "parameters, and let the engine average its gradient like any other's"
        )
