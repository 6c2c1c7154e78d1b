"""The devices of encoders, which need not be the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .._base.modules import parameters_in
from .._base.trees import tensors_of


def devices_of(modules: Iterable[nn.Module], model_input: Any) -> tuple[torch.device, ...]:
    """Return the devices of the modules' parameters; without parameters, of the input; without tensors, the CPU.

    The meta device is none of them: modules there are not called.

    >>> devices_of([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")], None)
    (device(type='cpu'),)
    """
    of_modules = _real_devices(parameters_in(*modules))
    return of_modules or _real_devices(tensors_of(model_input)) or (torch.device("cpu"),)


def _real_devices(tensors: Iterable[Tensor]) -> tuple[torch.device, ...]:
    return (*dict.fromkeys(x.device for x in tensors if x.device.type != "meta"),)
