"""The strategies of Lightning's Trainer and of Fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._framework import Framework
from .heads import ShardedHeads, agree_on_steps, class_of, clip_by_value

LIGHTNING = Framework("lightning", ("2.6.6",), "pip install 'lightning>=2.6.6'")

# Their callbacks that copy a module, and write rank 0's copy into the checkpoint.
_AVERAGING = ("WeightAveraging", "StochasticWeightAveraging")


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
        FrameworkError: if lightning is missing or too old.
        ValueError: when the Trainer sets the strategy up: for model averaging (`model_averaging_period`,
            WeightAveraging and StochasticWeightAveraging), start_method "spawn" and "fork", optimizers that shard
            parameters (ZeroRedundancyOptimizer), and a head whose group is not all processes. When it saves: for an
            optimizer whose state does not have a row for each class. When it loads: for one rank's part of a head.
    """
    if base is None:
        base = LIGHTNING.load("lightning.pytorch.strategies").DDPStrategy
    strategy: Any = class_of(_OfTrainer, base)
    return strategy(**settings)


class _OfTrainer(ShardedHeads):
    """Lightning's DDPStrategy with heads that DDP leaves alone: see `ddp_strategy`."""

    def setup(self: Any, trainer: Any) -> None:
        """Set up the module, DDP and the optimizers."""
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
            if {cls.__name__ for cls in type(callback).__mro__} & {*_AVERAGING}:
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
            agree_on_steps(getattr(plugin, "scaler", None))

    def load_model_state_dict(self: Any, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the module: heads take the rows of their classes."""
        self._keep_apart(self.lightning_module, self.world_size)
        load = super().load_model_state_dict  # type: ignore[misc]
        self._load_together(lambda: load(checkpoint, strict))

    def lightning_module_state_dict(self: Any) -> dict[str, Any]:
        """Return the module's state, on rank 0 with all classes."""
        return self._whole_state_dict(super().lightning_module_state_dict(), self.lightning_module)  # type: ignore[misc]

    def optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's state, on rank 0 with all classes."""
        raw = getattr(optimizer, "_optimizer", optimizer)  # of a LightningOptimizer
        return self._whole_optimizer_state(super().optimizer_state(optimizer), raw)  # type: ignore[misc]


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
        FrameworkError: if lightning is missing or too old.
        ValueError: from `fabric.setup`, for a head whose group is not all processes, and optimizers that shard
            parameters; from `fabric.save`, for an optimizer whose state does not have a row for each class; from
            `fabric.clip_gradients`, for another `norm_type` than 2.
    """
    if base is None:
        base = LIGHTNING.load("lightning.fabric.strategies").DDPStrategy
    strategy: Any = class_of(_OfFabric, base)
    return strategy(**settings)


class _OfFabric(ShardedHeads):
    """Fabric's DDPStrategy with heads that DDP leaves alone: see `fabric_ddp_strategy`."""

    def setup_module(self: Any, module: nn.Module) -> Any:
        """Wrap a module in DDP, without its heads."""
        self._keep_apart(module, self.world_size)
        if self._heads:
            agree_on_steps(getattr(self.precision, "scaler", None))
        return super().setup_module(module)  # type: ignore[misc]  # of their class

    def setup_optimizer(self: Any, optimizer: Optimizer) -> Any:
        """Set up an optimizer."""
        self._watch_optimizer(optimizer)
        return super().setup_optimizer(optimizer)  # type: ignore[misc]

    def get_module_state_dict(self: Any, module: nn.Module) -> dict[str, Any]:
        """Return a module's state, on rank 0 with all classes."""
        inner = getattr(module, "module", module) if isinstance(module, nn.parallel.DistributedDataParallel) else module
        return self._whole_state_dict(super().get_module_state_dict(module), inner)  # type: ignore[misc]

    def load_module_state_dict(self: Any, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load a module: heads take the rows of their classes."""
        load = super().load_module_state_dict  # type: ignore[misc]
        self._load_together(lambda: load(module, state_dict, strict))

    def get_optimizer_state(self: Any, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimizer's state, on rank 0 with all classes."""
        return self._whole_optimizer_state(super().get_optimizer_state(optimizer), optimizer)  # type: ignore[misc]

    def clip_gradients_norm(
        self: Any,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip by the norm of the whole gradient, and return it."""
        self.precision.unscale_gradients(optimizer)
        parameters = list(self.precision.main_params(optimizer))
        sharded = {id(p) for p in self._sharded()}
        if not any(id(p) in sharded for p in parameters):
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type must be 2 for an optimizer with a head's parameters, got {norm_type}")
        norm: Tensor = self._clip_by_norm(parameters, max_norm)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}; pass error_if_nonfinite=False to go on")
        return norm

    def clip_gradients_value(self: Any, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        """Clip each entry of each gradient."""
        self.precision.unscale_gradients(optimizer)
        clip_by_value(self.precision.main_params(optimizer), clip_val)
