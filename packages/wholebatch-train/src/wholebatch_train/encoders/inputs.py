"""The inputs of an encoder: a tensor, or a named tuple or a dictionary of tensors, all with one row for each item."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Inputs = Any
"""A tensor, a named tuple of tensors or a dictionary of tensors: it crosses processes, and goes to a device whole."""


def map_tensors(act: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs of the same form with `act` applied to each tensor."""
    if isinstance(inputs, Tensor):
        return act(inputs)
    if isinstance(inputs, Mapping):
        return {name: act(x) for name, x in inputs.items()}
    return type(inputs)(*(act(x) for x in inputs))


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Move every tensor to the device; from pinned memory the host does not wait."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), inputs)


def number_of_rows(inputs: Inputs) -> int:
    """Return the number of items that the inputs were prepared from."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    return len(next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs)))


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """Return these rows of every tensor."""
    return map_tensors(lambda x: x[rows], inputs)
