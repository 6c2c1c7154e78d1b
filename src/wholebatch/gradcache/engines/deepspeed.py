"""DeepSpeed: all passes of a step are one backward pass of its engine.

`engine.backward(loss)` is a prologue, autograd, and an epilogue. Hooks of the parameters hand gradients to the
optimizer, which reduces them at once, or in the epilogue:

    ZeRO    hook                                  epilogue
    0       none                                  reduces .grad in the last micro-step of an optimizer's step
    1       with overlap_comm, hands .grad over   likewise
    2, 3    hands .grad over                      reduces what is left, and adds it to the shard, in each micro-step

A second pass after an epilogue, or after a hook, would be another micro-step, or counted twice. So a step has

    passes    each with a prologue and an epilogue that reduces nothing; hooks do nothing, and .grad is the sum
    end       a prologue; every hook once, of the sum; an epilogue. If a caller is in engine.backward(), it is that one

So there are as many reductions as without caching, and the engine's own rules hold: micro-steps, their boundary,
no_sync(). DeepSpeed's `coalesce_grad_reduction()` does the same, but its end takes every block for an optimizer's whole
step, which loses earlier micro-steps; and a caller in engine.backward() reduces after it once more, zeros under ZeRO 1
and 2. Its switch for the hooks is used here.

Hooks of the engine's outputs divide their gradients by the number of micro-steps. From 0.19.5 on engine.backward() does
that to the loss, and tells the hooks by its graph, which the passes do not belong to: they see a number of 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .sync_control import SyncControl, with_attributes

_SWITCH = "_coalesce_grad_reduction"  # of the optimizers of ZeRO 1, 2 and 3: whether hooks do nothing


def _is_deepspeed(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "DeepSpeedEngine" and kind.__module__.split(".")[0] == "deepspeed"
        for kind in type(module).__mro__
    )


def _stage(engine: Any) -> int:
    return int(engine.zero_optimization_stage())


def _check(engine: Any) -> None:
    if getattr(engine, "pipeline_parallelism", False):
        raise ValueError(f"{type(engine).__name__} is a pipeline of DeepSpeed, which makes its passes itself")
    if getattr(engine, "zenflow", False):
        raise ValueError("zenflow of DeepSpeed must be off: it counts backward passes, of which each chunk makes one")
    if _stage(engine) and not hasattr(engine.optimizer, _SWITCH):
        version = getattr(sys.modules.get("deepspeed"), "__version__", "unknown")
        raise ValueError(
            f"DeepSpeed with ZeRO {_stage(engine)} must have engine.coalesce_grad_reduction() for its optimizer, which "
            f"is {type(engine.optimizer).__name__} of version {version}: use DeepSpeed >= 0.19.1, and gradients in the "
            "data type of the parameters"
        )


def _loss_is_divided(engine: Any) -> bool:
    """Return whether the caller is in the backward() of an engine that has divided the loss by the micro-steps."""
    kind = next(kind for kind in type(engine).__mro__ if kind.__name__ == "DeepSpeedEngine")
    tracker = getattr(sys.modules[kind.__module__], "_ENGINE_BACKWARD_GRAPH_TRACKER", None)
    others = bool(getattr(tracker, "_active_states", ()))
    return others or (engine._running_engine_backward and not hasattr(engine, "_scale_wrt_gas"))  # up to 0.19.4


def _needs_scaler(engine: Any) -> bool:
    if _stage(engine):
        return bool(engine.optimizer.needs_scaler())
    return getattr(engine, "torch_autocast_z0_gradscaler", None) is not None


@contextmanager
def _coalesce(engine: Any) -> Iterator[None]:
    """Make all passes inside one backward pass of the engine."""
    optimizer, running = engine.optimizer, engine._running_engine_backward
    if _stage(engine) and optimizer._backward_seen_this_step:
        raise ValueError(
            "an engine of DeepSpeed with ZeRO was called with and without gradient caching in one backward pass, and "
            "has reduced the gradients of the call without: cache both calls"
        )
    if not running and _needs_scaler(engine) and not engine._manual_backward_expected:
        raise ValueError(
            "an engine of DeepSpeed that scales the loss must be given as scaler=engine, or with deferred=True, go "
            "backward by engine.backward(loss)"
        )
    with ExitStack() as stack:
        if _loss_is_divided(engine):
            stack.enter_context(with_attributes(engine, gradient_accumulation_steps=lambda: 1))
        if _stage(engine):
            stack.enter_context(with_attributes(engine, _running_engine_backward=False, inside_no_sync_ctxt=True))
            stack.enter_context(with_attributes(optimizer, **{_SWITCH: True, "needs_scaler": lambda: False}))
        else:  # it refuses passes outside of its backward(), and has no epilogue after each
            stack.enter_context(with_attributes(engine, _running_engine_backward=True))
            stack.enter_context(with_attributes(engine, _start_timers=_no_timers, _stop_timers=_no_timers))
        yield
    with with_attributes(engine, _running_engine_backward=True):
        engine._backward_prologue()
        _run_hooks(engine)
        if not running:
            engine._backward_epilogue()
            engine._manual_backward_expected = False
    if _stage(engine):
        optimizer._backward_seen_this_step = False  # what follows is another backward pass


def _no_timers(_names: Any) -> None:
    """Leave timers alone, which must not be started twice."""


def _run_hooks(engine: Any) -> None:
    """Do as the hooks of all parameters do, the last ones first as in a backward pass."""
    optimizer, stage = engine.optimizer, _stage(engine)
    if stage == 3:
        for p in _parameters(optimizer.fp16_groups):
            if p.grad is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(p)
    elif stage:
        for number, group in reversed([*enumerate(optimizer.bit16_groups)]):
            for p in _parameters([group]):
                if optimizer.get_gradient_for_reduction(p) is not None:
                    optimizer.process_gradients(p, number)


def _parameters(groups: Any) -> Iterator[Tensor]:
    return (p for group in reversed(groups) for p in reversed(group) if p.requires_grad)


def _remember(engine: Any) -> Callable[[], None]:
    """Save the gradients of ZeRO 1 and 2 that are of another data type than their parameters."""
    held = [(p, getattr(p, "grad_accum", None)) for p in engine.module.parameters()]
    before = [(p, x, x.clone()) for p, x in held if x is not None]

    def put_back() -> None:
        for p, _ in held:
            if getattr(p, "grad_accum", None) is not None:
                p.grad_accum = None
        for p, x, value in before:
            p.grad_accum = x.copy_(value)

    return put_back


DEEPSPEED = SyncControl(
    _is_deepspeed,
    coalesce=_coalesce,
    collective=False,
    check=_check,
    remember=_remember,
    state=lambda engine: engine.global_steps,
)
DEEPSPEED_3 = replace(
    DEEPSPEED, matches=lambda module: _is_deepspeed(module) and _stage(module) == 3, collective=True, sharded=True
)
