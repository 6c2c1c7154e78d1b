"""FSDP2 (fully_shard) and FSDP1: their switches, and the gradients and whole parameters that they hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from .sync_control import SyncControl, no_sync, with_attributes

_SWITCHES = ("reduce_grads", "all_reduce_grads")  # of FSDP2's groups of parameters
_ARRIVED, _SET_ASIDE = "_post_backward_called", "_saved_grad_shard"  # of FSDP1's parameters
_ACCUMULATED = "unsharded_accumulated_grad"  # of FSDP2's parameters


def _fsdp1() -> type[Any] | None:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where this has not been imported, no module is of FSDP
    return getattr(fsdp, "FullyShardedDataParallel", None)


def _is_fsdp1(module: nn.Module) -> bool:
    kind = _fsdp1()
    return kind is not None and isinstance(module, kind)


def _check_fsdp1(module: Any) -> None:
    if getattr(module, "_is_root", None) is False:
        raise ValueError(
            "a model under FullyShardedDataParallel must be its outermost module, the only one with no_sync(), and was "
            "an inner one: give GradCache the outermost (in Lightning self.trainer.strategy.model), or use "
            "fully_shard, whose modules work one by one"
        )


def _hold_fsdp1(module: Any) -> AbstractContextManager[None]:
    """Return no_sync(), or inside of the module's own forward pass, where that is an error, its effect."""
    state = getattr(module, "training_state", None)
    return no_sync(module) if state is None or state.name == "IDLE" else _hold_inside_of_forward(module)


@contextmanager
def _hold_inside_of_forward(module: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for inner in module.modules():
            if _is_fsdp1(inner):
                stack.enter_context(with_attributes(inner, _sync_gradients=False))
        yield


def keep_accumulated_of_fsdp1(module: nn.Module) -> None:
    """Keep a backward pass of FSDP1 that does not reach its parameters from dropping their accumulated gradients.

    Where an encoder is called inside of FSDP1's own forward pass (Lightning), the backward pass of its output sets the
    sum of earlier reductions aside, and ends before the second passes. It puts the sum back if a gradient has arrived,
    by this attribute. If one has, and there is no sum, that is an error; no_sync() leaves the attribute set.
    """
    for inner in module.modules() if _is_fsdp1(module) else ():
        flat = getattr(getattr(inner, "_handle", None), "flat_param", None)
        if hasattr(flat, _ARRIVED):
            setattr(flat, _ARRIVED, hasattr(flat, _SET_ASIDE))


def fsdp_classes() -> tuple[type[Any], ...]:
    """Return the classes of FSDP's modules, of both versions, as far as they have been imported."""
    fsdp2 = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return tuple(kind for kind in (fsdp2, _fsdp1()) if kind is not None)


def whole_parameters_of_fsdp(module: Any) -> list[Tensor]:
    """Return the tensors that a module's graph has instead of its shards."""
    flat = getattr(getattr(module, "_handle", None), "flat_param", None)  # FSDP1
    shards = [shard for group in _groups_of(module) for shard in getattr(group, "fsdp_params", ())]
    whole = [getattr(shard, "_unsharded_param", None) for shard in shards]
    return [p for p in (flat, *whole) if p is not None]


def _groups_of(module: Any) -> list[Any]:
    """Return FSDP2's groups of parameters of one module."""
    state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
    several = getattr(state, "_fsdp_param_groups", None)  # in newer releases of torch
    return [getattr(state, "_fsdp_param_group", None)] if several is None else several


def _shards_of(module: nn.Module) -> list[Any]:
    """Return FSDP2's groups of parameters in a module, whose switches and gradients have no public names.

    The list is empty where a release of torch has other names than those that are known here.
    """
    groups: list[Any] = []
    for inner in module.modules():
        if hasattr(type(inner), "set_requires_gradient_sync"):
            groups += _groups_of(inner)
    return [group for group in groups if all(hasattr(group, name) for name in (*_SWITCHES, "fsdp_params"))]


@contextmanager
def _hold_fully_sharded(module: Any) -> Iterator[None]:
    before = [(group, name, getattr(group, name)) for group in _shards_of(module) for name in _SWITCHES]
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if not before:  # the public function does no more; it forgets what the caller has turned off
            module.set_requires_gradient_sync(True)
        for group, name, switch in before:
            setattr(group, name, switch)


def _remember_fully_sharded(module: Any) -> Callable[[], None]:
    """Save the gradients of whole parameters, which accumulate before they are reduced to shards, and of shards.

    Those of whole parameters are in their `grad`, and up to torch 2.14 also in another attribute. From 2.15 on that is
    a property which reads `grad`. After a forward pass of the outermost module `parameters()` returns its whole ones.
    """
    before, shards = [], [shard for group in _shards_of(module) for shard in group.fsdp_params]
    reduced = [(shard.sharded_param, shard.sharded_param.grad) for shard in shards]
    values = [None if grad is None else grad.clone() for _, grad in reduced]
    for shard in shards:
        whole = getattr(shard, "_unsharded_param", None)
        held = vars(shard).get(_ACCUMULATED), None if whole is None else whole.grad
        before.append((shard, *(None if x is None else x.clone() for x in held)))

    def put_back() -> None:
        for (p, grad), value in zip(reduced, values, strict=True):
            p.grad = grad if value is None else grad.copy_(value)
        for shard, accumulated, grad in before:
            if _ACCUMULATED in vars(shard):
                setattr(shard, _ACCUMULATED, accumulated)
            if hasattr(shard, "_unsharded_param"):
                shard._unsharded_param.grad = grad

    return put_back


FSDP2 = SyncControl(
    lambda module: hasattr(type(module), "set_requires_gradient_sync"),
    _hold_fully_sharded,
    remember=_remember_fully_sharded,
    state=lambda module: [shard.sharded_param._version for group in _shards_of(module) for shard in group.fsdp_params],
    sharded=True,
)
FSDP1 = SyncControl(_is_fsdp1, _hold_fsdp1, sharded=True, check=_check_fsdp1)
