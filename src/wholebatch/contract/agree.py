"""One handshake at the entry of a loss: every rank's arguments are valid and fit together, or every rank raises.

1. each rank checks shapes, types and settings          no device is read
2. each rank computes the numbers that values need      norms, scalars: they stay on the device
3. all ranks send facts and numbers in one handshake    the host waits once, for the numbers of all ranks
4. each rank checks the numbers and facts of all ranks  the same numbers, hence the same decision, on all
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
from ..comm.handshake import GRAD_ENABLED, different_facts
from ..comm.records import OnDevice
from ..kernels import check_kernel, choice, chooses, missing
from ..partition import Partition
from ..sweep import Products, select_products
from .autocast import autocast_around
from .backward import CALL, EARLIER, check_earlier, differed, latest_call, number_call
from .canaries import CANARIES, canaries_of
from .facts import Facts
from .gradients import enter, gradient_facts, join
from .inputs import MIN_PAIR_PRODUCT, SUM_OF_WEIGHTS, Checks, Inputs, norm_of
from .options import Options

_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
PRECISION = "precision of products"  # the one that was chosen
_NO_KERNELS, _CHOICES = "kernels are missing", "choices of kernels"  # why, or ""; their number so far
_MUST_MATCH = (
    _ARGUMENTS,
    "embedding size",
    "dtype",
    "device type",
    "sync",
    "exchange",
    "reduction",
    "kernel",
    PRECISION,
)
_NUMBERS, _DERIVED = "numbers", "derived"  # the fact with the numbers of a rank, and the one that follows from them
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
    checks = checks or Checks()
    comm = select_communicator(options.group)
    by_rank = comm.handshake(lambda: _local_facts(comm, options, inputs, checks), caller=caller)
    canaries_of(comm.transport).check(by_rank.columns_of_mapping(_NUMBERS))
    mistake = different_facts(caller, by_rank, (*_MUST_MATCH, *checks.must_match, GRAD_ENABLED))
    values = None if mistake is not None else _values_of_all(by_rank, comm.rank, inputs, checks)
    if values is None:
        found = _numbers(comm, inputs, checks)
        checked = comm.handshake(lambda: _check_values(comm, found, inputs, checks), caller=caller)
        if mistake is not None:
            raise mistake
        values = _Values.of(checked, inputs)
    check_earlier(comm.transport, {})
    rows = _partitions({name: tuple(by_rank.column("rows", name)) for name in inputs.given_features})
    first_name, first = inputs.first
    if rows[first_name].total == 0:
        raise ValueError(f"{caller}: the global batch is empty, every rank passed 0 rows; skip the step on all ranks")
    for name, of_ranks in values.scalars.items():
        _check_equal(caller, name, of_ranks)
    if inputs.weights[0] is not None and not any(values.weights):
        raise ValueError(
            f"{caller}: weights must not be 0 for every example of every rank; give at least one a positive weight"
        )
    joined = join([*inputs.differentiable.values()], by_rank)
    return Facts(
        caller=caller,
        call=number_call(by_rank.column(CALL)),
        options=options,
        comm=comm,
        scalars={name: of_ranks[0] for name, of_ranks in values.scalars.items()},
        rows=rows,
        norms={name: max(of_ranks) for name, of_ranks in values.norms.items()},
        min_pair_product=min(values.min_pair_products),
        inputs=enter(dict(zip(inputs.differentiable, joined, strict=True)), inputs.scalars, comm, options),
        vectors=inputs.given_ids,
        by_rank=by_rank.plus(values.derived),
        embedding_size=first.shape[1],
        given_dtype=first.dtype,
        features_dtype=first.dtype,
        products=Products(by_rank.column(PRECISION)[0], named=options.precision != "auto"),
        dtype=accumulation_dtype(first.dtype),
        device=first.device,
        kernels=_may_use_kernels(comm, options, by_rank, first.device),
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
        _NUMBERS: {
            name: OnDevice(x) if isinstance(x, Tensor) else x for name, x in _numbers(comm, inputs, checks).items()
        },
        _ARGUMENTS: inputs.names,
        "rows": {name: len(x) for name, x in inputs.given_features.items()},
        "embedding size": first.shape[1],
        "dtype": str(first.dtype),
        "device type": first.device.type,
        "sync": options.sync,
        "exchange": options.exchange,
        "memory": options.memory,
        "reduction": options.reduction,
        "kernel": options.kernel,
        PRECISION: products.precision,
        _NO_KERNELS: (missing(first.device) or "") if options.kernel == "auto" and chooses(first.device) else "",
        _CHOICES: choice.count(comm.transport.group_name),
        CALL: latest_call(),
        **loss_facts,
        **gradient_facts([*inputs.differentiable.values()]),
    }


def _may_use_kernels(comm: Communicator, options: Options, by_rank: FactsByRank, device: torch.device) -> bool:
    """Return whether kernels may compute tiles, the same on all ranks."""
    if by_rank.differing(_CHOICES) is not None:  # a rank was started again
        choice.forget(comm.transport.group_name)
    if options.kernel != "auto":
        return options.kernel == "triton"
    if not chooses(device):
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
            {name: checked.column("scalars", name) for name in inputs.given_scalars},
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
    columns = by_rank.columns_of_mapping(_NUMBERS)
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
        {name: columns[name] for name in inputs.given_scalars},
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
