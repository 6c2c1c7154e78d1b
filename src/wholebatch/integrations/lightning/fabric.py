"""The strategy of Lightning Fabric."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .heads import ShardedHeads, agree_on_steps, class_of, clip_by_value
from .trainer import LIGHTNING


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
