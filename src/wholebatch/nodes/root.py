"""Strategy "root": one rank computes the loss and its gradient; the others only send rows and receive gradients.

The root gathers X and computes L on separate leaves. Backward differentiates that graph with the incoming gradient,
scatters W dL/dX_r to the ranks, and gives every rank the root's dL/dtheta, as if all ranks had computed it.

Every parameter theta must be declared. Only the root would get the gradient of an undeclared one, so it raises. The
buffers of loss_fn (running statistics, queues) are copied from the root to every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._base.autograd import once_differentiable
from .._base.graph import checked_loss, finite_value, leaves_of
from ..comm import Communicator
from ..partition import Partition
from ..sync import Sync, feature_factor, replicated_loss_factor

# (all rows, the replacement of each tensor that holds no rows, by its id) -> L
Compute = Callable[[Sequence[Tensor], Mapping[int, Tensor]], Any]


@dataclass(frozen=True)
class LossState:
    """The tensors of a loss beside its rows."""

    passed: Sequence[Tensor]  # parameters that the loss receives; it computes with copies of them
    owned: Sequence[Tensor]  # parameters that it owns
    buffers: Sequence[Tensor]  # its buffers


def loss_at_root(
    comm: Communicator,
    root: int,
    sync: Sync,
    compute: Compute,
    rows: Sequence[Tensor],
    partitions: Sequence[Partition],
    state: LossState,
) -> Tensor:
    """Return L of all rows, computed on rank `root`; the same number on all ranks.

    Collective: a gather per input, a broadcast per buffer and a handshake; backward a scatter per differentiable input
    and a broadcast per parameter.
    """
    with_grad, passed, owned = torch.is_grad_enabled(), state.passed, state.owned
    loss = _LossAtRoot.apply(
        comm, root, sync, compute, partitions, (len(rows), len(passed), with_grad), *rows, *passed, *owned
    )
    with torch.no_grad():
        for buffer in state.buffers:
            buffer.copy_(comm.broadcast(buffer, root, check=False))
    return loss


class _LossAtRoot(Function):
    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        root: int,
        sync: Sync,
        compute: Compute,
        partitions: Sequence[Partition],
        layout: tuple[int, int, bool],
        *tensors: Tensor,
    ) -> Tensor:
        num_rows, num_passed, with_grad = layout
        rows, passed, owned = (
            tensors[:num_rows],
            tensors[num_rows : num_rows + num_passed],
            tensors[num_rows + num_passed :],
        )
        full = [
            comm.gather(x, root, counts=partition.counts, check=False)
            for x, partition in zip(rows, partitions, strict=True)
        ]
        nothing = torch.empty(0, device="cpu")
        loss, leaves = nothing, [nothing] * len(tensors)

        def state() -> dict[str, Any]:
            nonlocal loss, leaves
            if comm.rank != root:
                return {}
            with torch.set_grad_enabled(with_grad):
                copies = [x.detach() for x in (*full, *passed)]
                for copy, x in zip(copies, tensors, strict=False):
                    copy.requires_grad_(with_grad and x.requires_grad)
                swap = {id(x): copy for x, copy in zip(passed, copies[num_rows:], strict=True)}
                loss = checked_loss(compute(copies[:num_rows], swap))
                leaves = [*copies, *owned]
                _refuse_hidden_parameters(loss, leaves)
            return {"value": finite_value(loss), "dtype": str(loss.dtype).removeprefix("torch.")}

        sent = comm.handshake(state, caller="WholeBatch loss_fn")[root]
        ctx.comm, ctx.root, ctx.sync, ctx.partitions, ctx.num_tensors = comm, root, sync, partitions, len(tensors)
        # Saved tensors are freed with the graph, on every rank.
        ctx.save_for_backward(loss, *leaves, *tensors)
        return torch.tensor(sent["value"], dtype=getattr(torch, sent["dtype"]), device=rows[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        comm: Communicator = ctx.comm
        loss, *saved = ctx.saved_tensors
        leaves, tensors = saved[: ctx.num_tensors], saved[ctx.num_tensors :]
        needed = [i for i, need in enumerate(ctx.needs_input_grad[6:]) if need]
        gradients: list[Tensor | None] = [None] * len(needed)
        if comm.rank == ctx.root and loss.requires_grad:
            cotangent = grad.to(loss.dtype).reshape(loss.shape)
            gradients = list(
                torch.autograd.grad(loss, [leaves[i] for i in needed], cotangent, retain_graph=True, allow_unused=True)
            )
        features, replicated = feature_factor(ctx.sync, comm.size), replicated_loss_factor(ctx.sync, comm.size)
        results: list[Tensor | None] = [None] * len(tensors)
        for i, gradient in zip(needed, gradients, strict=True):
            x, is_rows = tensors[i].detach(), i < len(ctx.partitions)
            if comm.rank != ctx.root:
                sent = x[:0] if is_rows else x
            elif gradient is None:
                sent = x.new_zeros((ctx.partitions[i].total, *x.shape[1:]) if is_rows else x.shape)
            else:
                sent = gradient * (features if is_rows else replicated)
            if is_rows:
                results[i] = comm.scatter(sent, ctx.root, counts=ctx.partitions[i].counts, check=False)
            else:
                results[i] = comm.broadcast(sent, ctx.root, check=False)
        return (None, None, None, None, None, None, *results)


def _refuse_hidden_parameters(loss: Tensor, known: Sequence[Tensor]) -> None:
    """Raise ValueError unless every leaf that the loss depends on is among `known`."""
    known_ids = {id(x) for x in known}
    for leaf in leaves_of([loss]):
        if id(leaf) not in known_ids:
            raise ValueError(
                f"loss_fn depends on a parameter of shape {tuple(leaf.shape)} that it was not given; under "
                "strategy='root' only the root would see its gradient. Pass it to forward (by keyword, or in shape () "
                "by position), or make loss_fn a torch.nn.Module that owns it"
            )
