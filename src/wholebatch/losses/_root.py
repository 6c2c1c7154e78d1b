"""Strategy "root": one rank computes the loss and its gradient; the others only send rows and receive gradients.

The root gathers X, computes L and, at once, dL/dX and dL/dtheta: the loss's own graph is gone before the backward pass
begins. Backward scatters W dL/dX_r to the ranks, and gives every rank the root's dL/dtheta, as if all had computed it.

theta has to be known: the root alone would get a gradient for a parameter that loss_fn takes from elsewhere, so that is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .._once import once_differentiable
from ..comm import Communicator, handshake
from ..partition import Partition
from ..sync import Sync, feature_factor, replicated_loss_factor


def loss_at_root(
    comm: Communicator,
    root: int,
    sync: Sync,
    compute: Callable[[Sequence[Tensor]], Tensor],
    rows: Sequence[Tensor],
    partitions: Sequence[Partition],
    parameters: Sequence[Tensor],
) -> Tensor:
    """L = compute(all rows) on rank `root`; the same number on all ranks.

    Collective: a gather per input and a handshake; backward a scatter per differentiable input and a broadcast per
    parameter.
    """
    return _LossAtRoot.apply(comm, root, sync, compute, len(rows), partitions, *rows, *parameters)


class _LossAtRoot(Function):
    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        root: int,
        sync: Sync,
        compute: Callable[[Sequence[Tensor]], Tensor],
        num_rows: int,
        partitions: Sequence[Partition],
        *tensors: Tensor,
    ) -> Tensor:
        rows, parameters = tensors[:num_rows], tensors[num_rows:]
        needs = ctx.needs_input_grad[6:]
        full = [
            comm.gather(x, root, counts=partition.counts, check=False)
            for x, partition in zip(rows, partitions, strict=True)
        ]
        gradients: list[Tensor | None] = [None] * len(tensors)

        def state() -> dict[str, Any]:
            if comm.rank != root:
                return {}
            with torch.set_grad_enabled(any(needs)):
                leaves = [x.requires_grad_(need) for x, need in zip(full, needs[:num_rows], strict=True)]
                loss = checked_loss(compute(leaves))
                wanted = [i for i, need in enumerate(needs) if need]
                if wanted and loss.requires_grad:
                    known = [*leaves, *parameters]
                    _refuse_hidden_parameters(loss, [known[i] for i in wanted])
                    found = torch.autograd.grad(loss, [known[i] for i in wanted], allow_unused=True)
                    for i, gradient in zip(wanted, found, strict=True):
                        gradients[i] = gradient
            return {"value": loss.detach().item(), "dtype": str(loss.dtype).removeprefix("torch.")}

        told = handshake(comm, state, caller="WholeBatch loss_fn")[root]
        ctx.comm, ctx.root, ctx.sync, ctx.gradients = comm, root, sync, gradients
        ctx.partitions, ctx.like = partitions, [x.detach().new_empty(0) for x in tensors]
        ctx.shapes = [x.shape for x in tensors]
        device = rows[0].device
        return torch.tensor(told["value"], dtype=getattr(torch, told["dtype"]), device=device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        comm: Communicator = ctx.comm
        num_rows = len(ctx.partitions)
        features, replicated = feature_factor(ctx.sync, comm.size), replicated_loss_factor(ctx.sync, comm.size)
        results: list[Tensor | None] = []
        for i, need in enumerate(ctx.needs_input_grad[6:]):
            if not need:
                results.append(None)
                continue
            shape, like, is_rows = ctx.shapes[i], ctx.like[i], i < num_rows
            total = (ctx.partitions[i].total, *shape[1:]) if is_rows else shape
            here = like.new_zeros(total) if comm.rank == ctx.root else like.new_empty((0, *shape[1:]))
            if comm.rank == ctx.root and ctx.gradients[i] is not None:
                here = ctx.gradients[i] * (grad * (features if is_rows else replicated)).to(like.dtype)
            if is_rows:
                results.append(comm.scatter(here, ctx.root, counts=ctx.partitions[i].counts, check=False))
            else:
                here = here if comm.rank == ctx.root else like.new_empty(shape)
                results.append(comm.broadcast(here, ctx.root, check=False))
        return (None, None, None, None, None, None, *results)


def checked_loss(loss: Any) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a tensor of one element, got {got}; reduce it, e.g. by .mean()")
    return loss


def _refuse_hidden_parameters(loss: Tensor, known: Sequence[Tensor]) -> None:
    """Every leaf that the loss depends on is among `known`, or behind one of them."""
    stop = {x.grad_fn for x in known if x.grad_fn is not None}
    leaves = {id(x) for x in known}
    seen: set[Any] = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen or node in stop:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in leaves:
            raise ValueError(
                f"loss_fn depends on a parameter of shape {tuple(leaf.shape)} that it was not given; under "
                "strategy='root' only the root would see its gradient. Pass it to forward (by keyword, or in shape () "
                "by position), or make loss_fn a torch.nn.Module that owns it"
            )
        todo += [parent for parent, _ in node.next_functions]
