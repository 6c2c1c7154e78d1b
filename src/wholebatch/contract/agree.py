"""One handshake at the entry of a loss: every rank's arguments are valid and fit together, or every rank raises.

1. each rank checks shapes, types and settings         no device is read
2. each rank reads back the numbers that values need   one transfer from the device, whatever is checked
3. each rank derives facts from them, and sends these  one all-gather
4. each rank compares the facts of all ranks           the same comparison, hence the same error, on all
5. the inputs enter the graph of the loss              see `gradients`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._checks import on_host
from .._precision import accumulation_dtype
from ..comm import Communicator, select_communicator
from ..comm.handshake import GRAD_ENABLED
from ..kernels import check_kernel
from ..partition import Partition
from .backward import CALL, check_earlier, differed, latest_call, number_call
from .facts import Facts
from .gradients import enter, gradient_facts, join
from .inputs import MIN_PAIR_PRODUCT, Checks, Inputs
from .options import Options

_ARGUMENTS = "the arguments that are given (a rank without rows passes shape (0, d), not None)"
_MUST_MATCH = (_ARGUMENTS, "embedding size", "dtype", "device type", "sync", "exchange", "reduction", "kernel")
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
    by_rank = comm.handshake(
        lambda: _local_facts(comm, options, inputs, checks),
        caller=caller,
        must_match=(*_MUST_MATCH, *checks.must_match, GRAD_ENABLED),
    )
    rows = {name: Partition(tuple(by_rank.column("rows", name))) for name in inputs.given_features}
    first_name, first = inputs.first
    if rows[first_name].total == 0:
        raise ValueError(f"{caller}: the global batch is empty, every rank passed 0 rows; skip the step on all ranks")
    scalars = {name: by_rank.column("scalars", name) for name in inputs.given_scalars}
    for name, values in scalars.items():
        _check_equal(caller, name, values)
    if inputs.weights[0] is not None and not any(by_rank.column("weight")):
        raise ValueError(
            f"{caller}: weights must not be 0 for every example of every rank; give at least one a positive weight"
        )
    joined = join([*inputs.differentiable.values()], by_rank)
    return Facts(
        caller=caller,
        call=number_call(by_rank.column(CALL)),
        options=options,
        comm=comm,
        scalars={name: values[0] for name, values in scalars.items()},
        rows=rows,
        norms={name: max(by_rank.column("norms", name)) for name in inputs.given_features},
        min_pair_product=min(by_rank.column(MIN_PAIR_PRODUCT)),
        inputs=enter(dict(zip(inputs.differentiable, joined, strict=True)), inputs.scalars, comm, options),
        vectors=inputs.given_ids,
        by_rank=by_rank,
        embedding_size=first.shape[1],
        given_dtype=first.dtype,
        features_dtype=first.dtype,
        dtype=accumulation_dtype(first.dtype),
        device=first.device,
    ).in_range()


def _local_facts(comm: Communicator, options: Options, inputs: Inputs, checks: Checks) -> dict[str, Any]:
    """Return this rank's facts, if its arguments are valid."""
    options.check()
    inputs.check_features()
    first = inputs.first[1]
    comm.transport.use_device(first.device)
    check_kernel(options.kernel, first.device)
    loss_facts = checks.check()
    inputs.check_rest()
    found = on_host({**inputs.to_read_back(), **checks.read_back(), **differed(comm.transport)})  # one transfer
    check_earlier(comm.transport, found)
    return {
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
        CALL: latest_call(),
        **loss_facts,
        **inputs.check_values(found),
        **checks.derive(found),
        **gradient_facts([*inputs.differentiable.values()]),
    }


def _check_equal(caller: str, name: str, values: Sequence[float]) -> None:
    if max(values) - min(values) > _TOLERANCE * abs(values[0]):
        raise ValueError(
            f"{caller}: {name} must be the same on all ranks, got {values}; give all ranks the same initial "
            "parameters, and let the engine average its gradient like any other's"
        )
