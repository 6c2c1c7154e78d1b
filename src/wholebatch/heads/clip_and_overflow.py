"""Clip gradients and check them for overflow, for a backbone that all ranks hold and a head that they share.

The norm is that of the whole gradient: the backbone's gradient counts once, the parts of the head's gradient add up.
All ranks make a step or none does, because an overflow in one rank's part is an overflow of the head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from .._base.checks import check_dense, check_instance, check_items, check_real, is_dtensor
from .._base.precision import wide_dtype
from .._base.sparse_rows import coalesced
from ..comm import Group, select_communicator
from ..contract import bind_on_all_ranks


@bind_on_all_ranks
@torch.no_grad()
def clip_grad_norm_(
    replicated: Iterable[Tensor], sharded: Iterable[Tensor], max_norm: float, *, group: Group = None
) -> Tensor:
    """Scale all gradients, sparse ones too, by min(1, max_norm / norm) with the norm of the whole gradient.

    Args:
        replicated: parameters that all ranks hold, after their engine has averaged their gradients; also those of
            FSDP2, DTensors, whose parts add up over their mesh.
        sharded: parameters of which each rank holds a part, such as `head.parameters()`.
        max_norm: the largest norm that remains; infinity leaves the gradients unchanged.
        group: ranks that share the head.

    Returns:
        The norm before, shape (), float64, the same on all ranks. Collective: 1 handshake, and 1 all-reduce of a
        number; for DTensors 1 more.

    Raises:
        ValueError: on every rank: a parameter is in both lists, a DTensor is in `sharded`, or one of `replicated` has a
            Partial placement; max_norm is negative or NaN.
    """
    comm = select_communicator(group)
    everyone: list[Tensor] = []
    local: list[Tensor] = []
    most = 0.0

    def state() -> dict[str, Any]:
        nonlocal most
        for target, name, source in ((everyone, "replicated", replicated), (local, "sharded", sharded)):
            target.extend(_parameters(name, source))
        if {id(p) for p in everyone} & {id(p) for p in local}:
            raise ValueError(
                "replicated and sharded must have no parameter in common, got one in both: pass a parameter as one or "
                "the other, not both, and leave head.parameters() out of replicated"
            )
        if any(is_dtensor(p.grad) for p in local):
            raise ValueError(
                "sharded must hold no DTensors, got one: the ranks that hold its parts are those of its mesh; pass the "
                "parameters of FSDP2 as replicated"
            )
        if any(_is_partial(p.grad) for p in everyone):
            raise ValueError(
                "replicated must hold no DTensor with a Partial placement, got one: its values are addends, which have "
                "no norm; redistribute the gradient first"
            )
        most = check_real("max_norm", max_norm)
        if not most >= 0.0:
            raise ValueError(f"max_norm must be at least 0, got {max_norm}; float('inf') does not clip")
        return {"max_norm": str(most)}

    comm.handshake(state, caller="clip_grad_norm_", must_match=("max_norm",))
    everyone, local = ([p for p in parameters if p.grad is not None] for parameters in (everyone, local))
    device = next((p.device for p in (*everyone, *local)), torch.device("cpu"))
    whole = _square_norm(everyone, device) + comm.all_reduce(_square_norm(local, device), check=False)
    norm = whole.sqrt()
    if math.isinf(most):
        return norm
    factor = (most / (norm + 1e-6)).clamp(max=1.0)
    for p in (*everyone, *local):
        _values(p).mul_(factor.to(p.dtype))
    return norm


@bind_on_all_ranks
@torch.no_grad()
def agree_on_overflow(scaler: GradScaler, *optimizers: Optimizer, group: Group = None) -> None:
    """Share overflows found by `scaler.unscale_` with every rank, so that all ranks skip the step or none.

    Args:
        scaler: a torch.amp.GradScaler that has unscaled these optimizers' gradients.
        optimizers: of the backbone and of the head.
        group: ranks that share the head. Collective: 1 handshake, 1 all-reduce of a number for each optimizer.

    Raises:
        ValueError: on every rank: an optimizer's gradients have not been unscaled.
    """
    comm = select_communicator(group)

    def state() -> dict[str, Any]:
        check_instance("scaler", scaler, GradScaler, "a torch.amp.GradScaler")
        for optimizer in optimizers:
            check_instance("optimizers", optimizer, Optimizer, "optimizers of torch")
            if scaler.is_enabled() and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
                raise ValueError(
                    "optimizers must have unscaled gradients: call scaler.unscale_(optimizer) for each before"
                )
        return {"optimizers": len(optimizers), "enabled": scaler.is_enabled()}

    comm.handshake(state, caller="agree_on_overflow", must_match=("optimizers", "enabled"))
    if not scaler.is_enabled():
        return
    for optimizer in optimizers:
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if not flags and comm.size == 1:
            continue
        device = next(p.device for param_group in optimizer.param_groups for p in param_group["params"])
        local = torch.stack([x.to(device) for x in flags.values()]).amax() if flags else torch.zeros((), device=device)
        overflow = comm.all_reduce(local.reshape(()), "max", check=False)
        for x in flags.values():
            x.fill_(overflow.item())
        if not flags:
            flags[device] = overflow.reshape(1)


def _parameters(name: str, parameters: Any) -> list[Tensor]:
    """Return the parameters of a list, or the one that was given instead of a list."""
    items: list[Any] = [parameters] if isinstance(parameters, Tensor) else check_items(name, parameters, "parameters")
    for p in items:
        check_instance(name, p, Tensor, "parameters, or one of them")
        if p.grad is not None and not p.grad.is_sparse and not is_dtensor(p.grad):
            check_dense(f"a gradient of {name}", p.grad)
    return items


def _is_partial(x: Any) -> bool:  # a gradient, or None
    return is_dtensor(x) and any(placement.is_partial() for placement in x.placements)


def _square_norm(parameters: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of gradients; the parts of a DTensor add up over the axes that shard it."""
    total = torch.zeros((), dtype=wide_dtype(device), device=device)
    part_squares: dict[tuple[dist.ProcessGroup, ...], Tensor] = {}  # by the groups of these axes
    for p in parameters:
        square = torch.linalg.vector_norm(_values(p), dtype=total.dtype) ** 2
        grad: Any = p.grad
        groups: tuple[dist.ProcessGroup, ...] = ()
        if is_dtensor(grad):
            placements = enumerate(grad.placements)
            groups = tuple(grad.device_mesh.get_group(axis) for axis, kind in placements if not kind.is_replicate())
        part_squares[groups] = part_squares.get(groups, 0) + square
    for groups, square in part_squares.items():
        for group in groups:
            dist.all_reduce(square, group=group)
        total += square
    return total


def _values(p: Tensor) -> Tensor:
    """Return the stored entries of a gradient: of a DTensor, the local ones."""
    grad: Any = p.grad
    assert grad is not None
    if is_dtensor(grad):
        local: Tensor = grad.to_local()
        return local
    assert p.grad is not None
    if not p.grad.is_sparse:
        return p.grad
    p.grad = coalesced(p.grad)
    return p.grad._values()
