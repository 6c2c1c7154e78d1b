"""Any single-process loss of the whole batch's representations, made exact on many processes.

L = loss_fn(X_1, X_2, ...) of all rows, computed in full on every rank or on one. The strategies differ in the route of
the gradient. All give W dL/dX_r to rank r's rows, as an averaging engine needs it:

    "gather"     the gather's adjoint adds the W equal gradients of the ranks: one reduce-scatter per input
    "replicate"  gathered without gradient, with the local rows put back; their gradient is dL/dX_r, times W here
    "root"       one rank gathers, computes L and its gradient, and scatters that, times W: see `nodes.root`

The factor W belongs to the gradient of the features alone. The usual recipe multiplies the loss by it, and so the
gradient of every parameter inside loss_fn: that of its temperature is then W times too large after the average.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .._base.autograd import once_differentiable
from .._base.checks import (
    check_callable,
    check_choice,
    check_dense,
    check_finite,
    check_floating_dtype,
    check_integer,
)
from .._base.graph import checked_loss, finite_value
from ..comm import Communicator, Group, autograd, select_communicator
from ..comm.handshake import GRAD_ENABLED, NEEDS_GRAD
from ..comm.maps import AllGather
from ..comm.modules import built, numbered
from ..comm.order import Call
from ..comm.select import check_group
from ..contract import (
    CALL,
    check_inference,
    gradient_facts,
    join,
    latest_call,
    state_of,
    together,
)
from ..nodes.root import LossState, loss_at_root
from ..partition import Partition
from ..sync import Sync, check_sync, replicated_loss_factor, scale_gradient

STRATEGIES = ("gather", "replicate", "root")


class WholeBatch(nn.Module):
    """Make a single-process loss exact: loss_fn of the concatenated global batch, on any number of ranks.

    L = loss_fn(X_1, X_2, ..., **kwargs),    X_k: the rows of all ranks, rank 0 first.

    Args:
        loss_fn: a single-process loss: full-batch tensors in, a scalar out. A module's parameters become parameters
            of this one. It must give the same value on every rank: no dropout, or the same seed everywhere.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        strategy: "gather", "replicate" or "root", compared below. The gradients are the same.
        root: the rank that computes under "root"; it may hold no rows.

    Parameters of the loss (a temperature, a projection inside loss_fn, a tensor passed by keyword) receive dL/dtheta
    in full on every rank under `sync="mean"`, and 1/W of it under "sum" and None, so that the ranks' gradients add up.

    "replicate" needs no communication in backward. "gather" needs one reduce-scatter per differentiable input, and is
    also right where loss_fn's gradient differs between ranks by rounding, because each rank gets the average. With
    both, each rank does the work and holds the memory of the whole batch. With "root" one rank does, and the others
    wait: for one device with more memory than the rest. loss_fn may then use only parameters that it owns as a module
    or receives as arguments. Only the gradient of "gather" can be differentiated again. Where a flat loss exists
    (`wholebatch.CLIPLoss`), it does 1/W of the work.

    Every rank must call `backward`, with the same incoming gradient and in the same order among losses. With "gather"
    and "root", all ranks raise ValueError if they differ. With "replicate" nothing travels, so this is not detected.

    Raises:
        ValueError: if `strategy` or `sync` does not exist, or `loss_fn` is not callable.

    >>> import torch, wholebatch as wb
    >>> loss = wb.WholeBatch(lambda x, y: (x @ y.T).logsumexp(1).mean())
    >>> loss(torch.zeros(4, 3), torch.zeros(4, 3))
    tensor(1.3863)
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor],
        *,
        group: Group = None,
        sync: Sync = "mean",
        strategy: Literal["gather", "replicate", "root"] = "gather",
        root: int = 0,
    ) -> None:
        super().__init__()
        self._number = next(built)
        check_sync(sync)
        check_choice("strategy", strategy, STRATEGIES)
        check_callable("loss_fn", loss_fn)
        check_integer("root", root, minimum=0, maximum=2**31 - 1, detail="a rank")
        check_group(group)
        self.loss_fn, self.group, self.sync, self.strategy, self.root = loss_fn, group, sync, strategy, root

    @numbered
    def forward(self, *representations: object, **kwargs: object) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            representations: tensors with rows, (b_r, ...), are gathered along dimension 0; b_r may differ between
                ranks and may be 0. Two of them whose rows belong together have the same b_r. Integer tensors (labels)
                are gathered without gradient. Tensors without dimensions (a temperature) and everything else are
                passed to loss_fn as they are.
            kwargs: passed to loss_fn as they are, tensors too: the same on all ranks.

        Raises:
            ValueError: on every rank, whichever rank made the mistake: for dtypes or trailing shapes that differ
                between ranks, NaN or infinite rows, an empty global batch, a scale of shape [1] instead of rows, rows
                of two inputs that are distributed differently; for a loss_fn that raises, does not return a scalar,
                or returns a value that differs between ranks or is NaN or infinite on any of them. This also holds
                under a gradient scaler: the inputs are finite, so the overflow happens inside loss_fn, and no scale
                of the loss fixes it. As every rank raises, a training loop may catch the error and skip the step.
        """
        comm = select_communicator(self.group)
        group = state_of(comm.transport)
        has_rows = [isinstance(x, Tensor) and x.dim() > 0 for x in representations]
        inputs = [x for x in representations if isinstance(x, Tensor) and x.dim() > 0]
        passed, owned, buffers = self._tensors_of_loss(representations, has_rows, kwargs)

        def state() -> dict[str, Any]:
            differed = group.canaries.differed
            group.canaries.check_differed(0.0 if differed is None else differed.item())
            if not inputs:
                raise ValueError("pass at least one tensor with rows, (rows, ...), as a positional argument")
            if self.root >= comm.size:
                raise ValueError(f"root must be a rank of the group, 0 to {comm.size - 1}; got {self.root}")
            for position, x in enumerate(inputs):
                check_dense(f"representation {position}", x)
                if x.is_floating_point():
                    check_floating_dtype(f"the dtype of representation {position}", x.dtype)
                check_finite(f"representation {position}", x)
            return {
                "sync": self.sync,
                "strategy": self.strategy,
                "root": self.root,
                "parameters": [list(x.shape) for x in (*passed, *owned, *buffers)],
                "rows": [len(x) for x in inputs],
                "dtypes": [str(x.dtype) for x in inputs],
                "device types": [x.device.type for x in inputs],
                "trailing shapes": [list(x.shape[1:]) for x in inputs],
                CALL: latest_call(),
                **gradient_facts(inputs),
            }

        everyone = comm.handshake(
            state,
            caller="WholeBatch",
            must_match=(
                "sync",
                "strategy",
                "root",
                "parameters",
                "dtypes",
                "device types",
                "trailing shapes",
                GRAD_ENABLED,
            ),
        )
        partitions = [Partition(counts) for counts in zip(*(facts["rows"] for facts in everyone), strict=True)]
        if not any(partition.total for partition in partitions):
            raise ValueError("WholeBatch: the global batch is empty, every rank passed 0 rows")
        _refuse_gathered_scalars(inputs, partitions)
        _refuse_misaligned_rows(partitions)

        def compute(full: Iterable[Tensor], swap: Mapping[int, Tensor] | None = None) -> Any:
            remaining, swap = iter(full), swap or {}
            arguments = [
                next(remaining) if rows else swap.get(id(x), x)
                for x, rows in zip(representations, has_rows, strict=True)
            ]
            return self.loss_fn(*arguments, **{name: swap.get(id(x), x) for name, x in kwargs.items()})

        check_inference(everyone)
        needed = [any(flags) for flags in zip(*everyone.column(NEEDS_GRAD), strict=True)]
        inputs = [*join(dict(enumerate(inputs)), needed).values()]
        call = group.number_call([facts[CALL] for facts in everyone])
        if self.strategy == "root":
            loss = loss_at_root(
                comm, self.root, self.sync, compute, inputs, partitions, LossState(passed, owned, buffers)
            )
            return together(loss, comm, "WholeBatch", call)
        distribute = _gather if self.strategy == "gather" else _replicate
        full = [distribute(comm, x, partition) for x, partition in zip(inputs, partitions, strict=True)]
        loss = _same_on_all_ranks(comm, lambda: compute(full))
        loss = scale_gradient(loss, replicated_loss_factor(self.sync, comm.size))
        communicates = self.strategy == "gather" and any(x.requires_grad for x in inputs)
        return together(loss, comm, "WholeBatch", call) if communicates else loss

    def _tensors_of_loss(
        self, representations: Sequence[object], has_rows: Sequence[bool], kwargs: Mapping[str, object]
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return the parameters that loss_fn receives, those that it owns, and its buffers, for strategy "root"."""
        if self.strategy != "root":
            return [], [], []
        candidates = [x for x, rows in zip(representations, has_rows, strict=True) if not rows] + [*kwargs.values()]
        passed = {id(x): x for x in candidates if isinstance(x, Tensor) and x.requires_grad}
        module = self.loss_fn if isinstance(self.loss_fn, nn.Module) else nn.Module()
        return [*passed.values()], [x for x in module.parameters() if x.requires_grad], [*module.buffers()]

    def extra_repr(self) -> str:
        return f"strategy={self.strategy!r}, sync={self.sync!r}"


def _gather(comm: Communicator, x: Tensor, partition: Partition) -> Tensor:
    """Return all rows. Their gradient is the sum over ranks of W equal ones, W dL/dX_r for the local rows."""
    if not x.requires_grad:
        return _gather_without_gradient(comm, x, partition)
    return autograd.apply(
        AllGather(comm.transport, partition.counts), x, Call(comm.transport, "WholeBatch's all_gather", check="before")
    )


def _gather_without_gradient(comm: Communicator, x: Tensor, partition: Partition) -> Tensor:
    """Return all rows as constants."""
    with torch.no_grad():
        return comm.all_gather(x, counts=partition.counts, check=False)


def _replicate(comm: Communicator, x: Tensor, partition: Partition) -> Tensor:
    """Return all rows: the local ones with W times their gradient, the others without gradient."""
    local = partition.rows(comm.rank)
    full = _gather_without_gradient(comm, x, partition)
    if not x.requires_grad:
        return full
    return torch.cat([full[: local.start], _LocalRows.apply(x, comm.size), full[local.stop :]])


class _LocalRows(Function):
    """The identity with its gradient times W; no second derivative, which would lack the other ranks' part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.size = size
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.size, None


def _refuse_gathered_scalars(inputs: list[Tensor], partitions: list[Partition]) -> None:
    """Raise ValueError for a scale of shape [1] on every rank, which would be gathered as one row of each rank."""
    if len(partitions[0].counts) == 1 or all(set(partition.counts) == {1} for partition in partitions):
        return
    for position, (x, partition) in enumerate(zip(inputs, partitions, strict=True)):
        if x.shape == (1,) and x.is_floating_point() and set(partition.counts) == {1}:
            raise ValueError(
                f"WholeBatch: representation {position} has shape [1] on every rank and would be gathered as one row "
                "of each; pass a scale or bias by keyword, or in shape ()"
            )


def _refuse_misaligned_rows(partitions: list[Partition]) -> None:
    """Raise ValueError for two inputs with equally many rows in all that are distributed differently over the ranks."""
    for position, partition in enumerate(partitions):
        for other in range(position):
            if partition.total == partitions[other].total and partition != partitions[other]:
                raise ValueError(
                    f"WholeBatch: representations {other} and {position} have {partition.total} rows each, but "
                    "distributed differently over the ranks, "
                    f"{list(partitions[other].counts)} and {list(partition.counts)}; rows that belong together must be "
                    "on the same rank"
                )


def _same_on_all_ranks(comm: Communicator, compute: Callable[[], Any]) -> Tensor:
    """Return the loss if all ranks have computed it without error and with the same value.

    Values may differ by 1e-4, or 1e-6 around zero, because machines may sum in different orders.
    """
    loss: Any = None

    def state() -> dict[str, Any]:
        nonlocal loss
        loss = checked_loss(compute())
        return {"value": finite_value(loss)}

    values = [facts["value"] for facts in comm.handshake(state, caller="WholeBatch loss_fn")]
    if not all(_is_close(value, values[0]) for value in values):
        raise ValueError(
            f"WholeBatch: loss_fn must give the same value on all ranks, got {values}; otherwise no single loss is "
            "differentiated. Does it use dropout, a local batch size, a rank, or parameters that differ between ranks?"
        )
    return loss.reshape(())


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-6)
