"""Lightning and Fabric with a head whose classes are sharded over the ranks, `wholebatch.PartialFC`.

    from wholebatch.integrations.lightning import ddp_strategy

    Trainer(strategy=ddp_strategy(), devices=2).fit(module)

DDP gives all ranks the same parameters and the mean of their gradients. The ranks' parts of a head are different
classes, so both would be wrong. The strategies of this module are those of Lightning and Fabric, with four changes: DDP
leaves heads alone; the norm of a gradient that is clipped contains the parts of all ranks; all ranks skip a step after
an overflow, or none; and a checkpoint holds all classes, as one process would write it, for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

import wholebatch as wb

from .._base.sparse_rows import coalesced
from ..comm import select_communicator
from ..heads import all_classes
from ._framework import LIGHTNING

__all__ = ["ddp_strategy", "fabric_ddp_strategy"]

_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}  # they write rank 0's copy into the checkpoint
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # read by DistributedDataParallel, and by Lightning


class ShardedHeads:
    """The heads of one strategy; the base of a strategy of either framework.

    `super()` of its subclasses is the framework's DDPStrategy.
    """

    _base: type  # the framework's class
    _heads: all_classes.Heads = MappingProxyType({})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a strategy, for the launchers that start processes by spawning: its class is made at run time."""
        state = self.__getstate__() if hasattr(self, "__getstate__") else dict(vars(self))
        return _new, (type(self).__bases__[0], self._base), state

    def _keep_apart(self, module: nn.Module, world_size: int) -> None:
        """Make DDP leave the heads of a module alone; a head that was created with all classes keeps the local ones."""
        heads = all_classes.heads_of(module)
        for name, head in heads.items():
            size = select_communicator(head.options.group).size
            if size != world_size:
                raise ValueError(
                    f"group of the head {name!r} must be all {world_size} processes of the strategy, got a group of "
                    f"{size}; leave group out"
                )
            all_classes.keep_local_classes(head)
        self._heads = {**self._heads, **heads}
        if heads:
            setattr(module, _IGNORED, [*{*getattr(module, _IGNORED, ()), *all_classes.names_in(module)}])

    def _load_together(self, load: Callable[[], None]) -> None:
        """Load a module's state, and raise on all ranks if it does not fit one of them."""
        if not self._heads:
            load()
            return
        failed: RuntimeError | None = None

        def state() -> dict[str, object]:
            nonlocal failed
            try:
                load()
            except RuntimeError as error:  # torch's, about missing and unexpected names
                failed = error
            else:
                for head in self._heads.values():
                    head.check_local()
            return {"failed": failed is not None}

        everyone = select_communicator(None).handshake(state, caller="load_state_dict")
        if failed is not None:
            raise failed
        if any(facts["failed"] for facts in everyone):
            raise ValueError("another rank cannot load the state of the module; read that rank's error")

    def _watch_optimizer(self, optimizer: Optimizer) -> None:
        """Take the local rows of each state that the optimizer loads."""
        if self._heads and hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"the optimizer must not be sharded over the ranks beside a head of sharded classes, got "
                f"{type(optimizer).__name__}: it overwrites parameters by another rank's. Pass another optimizer, such "
                "as SGD or AdamW of torch, or wholebatch.SparseSGD"
            )
        if getattr(optimizer, "_wholebatch_watched", False):
            return
        optimizer._wholebatch_watched = True  # type: ignore[attr-defined]
        optimizer.register_load_state_dict_pre_hook(
            lambda optimizer, state: all_classes.local_optimizer_state(state, optimizer, self._heads)
        )

    def _clip_by_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip by the norm of the whole gradient, and return it; None if no head is among the parameters."""
        tensors = list(parameters)
        sharded = {id(p) for head in self._heads.values() for p in (head.weight, head.bias) if p is not None}
        local = [p for p in tensors if id(p) in sharded]
        if not local:
            return None
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type must be 2 for an optimizer with a head's parameters, got {norm_type}")
        return wb.heads.clip_grad_norm_([p for p in tensors if id(p) not in sharded], local, float(max_norm))


def _agree_on_steps(scaler: GradScaler | None) -> None:
    """Let all ranks skip a step if any rank's gradient has overflowed, in its part of a head."""
    if scaler is None or "step" in vars(scaler):
        return
    step = scaler.step

    def agreed(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY:
            scaler.unscale_(optimizer)
        wb.heads.agree_on_overflow(scaler, optimizer)
        return step(optimizer, *args, **kwargs)

    scaler.step = agreed  # type: ignore[method-assign]


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], clip_value: float) -> None:
    """Clip each entry of each gradient; torch's function does not take sparse gradients."""
    tensors = [p for p in parameters if p.grad is not None]
    for p in tensors:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = coalesced(p.grad)
            p.grad._values().clamp_(-clip_value, clip_value)
    nn.utils.clip_grad_value_([p for p in tensors if p.grad is not None and not p.grad.is_sparse], clip_value)


@cache
def _class_of(ours: type, base: type) -> Any:
    """Return a subclass of our class and the framework's."""
    return type(base.__name__, (ours, base), {"_base": base, "__doc__": ours.__doc__})


def _new(ours: type, base: type) -> object:
    return object.__new__(_class_of(ours, base))


def ddp_strategy(
    base: type | None = None,
    **settings: Any,  # theirs
) -> Any:  # their class, which is imported here
    """Return Lightning's DDPStrategy for a LightningModule that holds heads, `wholebatch.PartialFC`, as attributes.

    The Trainer does all else as with `strategy="ddp"`. A module without a head is trained as there. The head may be
    created in `configure_model`, or in `__init__`, where each process first holds all classes and then keeps its own.

    `gradient_clip_val` clips by the norm of the whole gradient: parts of a head add up, replicated parameters count
    once. Checkpoints contain all classes, and the optimizer's state of all. Rank 0 gathers them on its CPU, and holds
    C d numbers and as many for each tensor of the optimizer's state; so does each rank that loads. One process loads
    such a checkpoint without this strategy. Call `trainer.save_checkpoint` on all ranks, as Lightning asks for.

    Args:
        base: the strategy's class: a subclass of DDPStrategy, or `pytorch_lightning.strategies.DDPStrategy` for a
            Trainer of that package. Default: `lightning.pytorch.strategies.DDPStrategy`.
        settings: arguments of `base`, such as find_unused_parameters or static_graph.

    Raises:
        ValueError: when the Trainer sets the strategy up: for model averaging (`model_averaging_period`,
            WeightAveraging and StochasticWeightAveraging), start_method "spawn" and "fork", optimizers that shard
            parameters (ZeroRedundancyOptimizer), and a head whose group is not all processes. When it saves: for an
            optimizer whose state does not have a row for each class. When it loads: for one rank's part of a head.
    """
    return _class_of(_OfTrainer, base or LIGHTNING.load("lightning.pytorch.strategies").DDPStrategy)(**settings)


class _OfTrainer(ShardedHeads):
    """Lightning's DDPStrategy. States have all classes on rank 0; heads take the rows of their classes from them."""

    def setup(self: Any, trainer: Any) -> None:
        self._keep_apart(self.lightning_module, self.world_size)
        if self._heads:
            self._refuse(trainer.callbacks)
        super().setup(trainer)  # type: ignore[misc]  # of their class
        for optimizer in self.optimizers:
            self._watch_optimizer(optimizer)
        self._watch_precision(self.precision_plugin)

    def _refuse(self: Any, callbacks: Sequence[object]) -> None:
        """Raise ValueError for settings of theirs that read or write rank 0's part of a head alone."""
        method = getattr(self, "_start_method", "popen")
        if method != "popen":
            raise ValueError(
                f"start_method must be 'popen' with a head of sharded classes, got {method!r}: Lightning would return "
                "rank 0's part to the process that starts the others; leave it out, or start with torchrun"
            )
        for callback in callbacks:
            if {cls.__name__ for cls in type(callback).__mro__} & _AVERAGING:
                raise ValueError(
                    f"callbacks must not contain {type(callback).__name__} with a head of sharded classes: it writes "
                    "an average of rank 0's classes alone into checkpoints; leave it out"
                )
        period = getattr(self, "_model_averaging_period", None)
        if period is not None:
            raise ValueError(
                f"model_averaging_period must be None with a head of sharded classes, got {period}: it would average "
                "centers of different classes"
            )

    def _watch_precision(self: Any, plugin: Any) -> None:
        """Replace the plugin's clipping, and let its scaler agree on skipped steps."""
        by_norm = type(plugin).clip_grad_by_norm

        def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
            if self._clip_by_norm(plugin.main_params(optimizer), clip_val) is None:
                by_norm(plugin, optimizer, clip_val)

        plugin.clip_grad_by_norm = clip_grad_by_norm
        plugin.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value(plugin.main_params(optimizer), clip_val)
        if self._heads:
            _agree_on_steps(getattr(plugin, "scaler", None))

    def load_model_state_dict(self: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._keep_apart(self.lightning_module, self.world_size)
        load = super().load_model_state_dict  # type: ignore[misc]
        self._load_together(lambda: load(checkpoint, strict))

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        state = super().lightning_module_state_dict()  # type: ignore[misc]
        return all_classes.whole_state_dict(state, all_classes.heads_of(self.lightning_module))

    def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        raw = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        return all_classes.whole_optimizer_state(super().optimizer_state(optimizer), raw, self._heads)  # type: ignore[misc]


def fabric_ddp_strategy(
    base: type | None = None,
    **settings: Any,  # theirs
) -> Any:  # their class, which is imported here
    """Return Fabric's DDPStrategy for a module that holds heads, `wholebatch.PartialFC`, as attributes.

    Pass the module that contains the head to `fabric.setup`, with its optimizers. Clipping (`fabric.clip_gradients`)
    and checkpoints (`fabric.save` and `fabric.load`) are then those of :func:`ddp_strategy`.

    Args:
        base: the strategy's class, a subclass of Fabric's DDPStrategy. Default:
            `lightning.fabric.strategies.DDPStrategy`.
        settings: arguments of `base`.

    Raises:
        ValueError: from `fabric.setup`, for a head whose group is not all processes, and optimizers that shard
            parameters; from `fabric.save`, for an optimizer whose state does not have a row for each class; from
            `fabric.clip_gradients`, for another `norm_type` than 2.
    """
    return _class_of(_OfFabric, base or LIGHTNING.load("lightning.fabric.strategies").DDPStrategy)(**settings)


class _OfFabric(ShardedHeads):
    """Fabric's DDPStrategy, with the same differences."""

    def setup_module(self: Any, module: nn.Module) -> Any:
        self._keep_apart(module, self.world_size)
        if self._heads:
            _agree_on_steps(getattr(self.precision, "scaler", None))
        return super().setup_module(module)  # type: ignore[misc]  # of their class

    def setup_optimizer(self: Any, optimizer: Optimizer) -> Any:
        self._watch_optimizer(optimizer)
        return super().setup_optimizer(optimizer)  # type: ignore[misc]

    def get_module_state_dict(self: Any, module: nn.Module) -> dict[str, Any]:
        inner = getattr(module, "module", module) if isinstance(module, nn.parallel.DistributedDataParallel) else module
        return all_classes.whole_state_dict(super().get_module_state_dict(module), all_classes.heads_of(inner))  # type: ignore[misc]

    def load_module_state_dict(self: Any, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        load = super().load_module_state_dict  # type: ignore[misc]
        self._load_together(lambda: load(module, state_dict, strict))

    def get_optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        return all_classes.whole_optimizer_state(super().get_optimizer_state(optimizer), optimizer, self._heads)  # type: ignore[misc]

    def clip_gradients_norm(
        self: Any,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        norm: Tensor | None = self._clip_by_norm(parameters, max_norm, norm_type)
        if norm is None:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; pass error_if_nonfinite=False to go on")
        return norm

    def clip_gradients_value(self: Any, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), clip_val)
