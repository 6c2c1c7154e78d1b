"""Checks of a loss, and the leaves of its graph."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from .checks import is_dense


def checked_loss(loss: Any) -> Tensor:
    """Return the loss if it is a tensor of one number."""
    if not isinstance(loss, Tensor) or not is_dense(loss) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if is_dense(loss) else type(loss).__name__
        raise ValueError(f"loss_fn must return a tensor of one element, got {got}; reduce it, e.g. by .mean()")
    if not loss.is_floating_point():
        raise ValueError(f"loss_fn must return a floating-point number, got {loss.dtype}")
    return loss


def finite_value(loss: Tensor) -> float:
    """Return the loss as a number if it is finite."""
    value = loss.detach().item()
    if not math.isfinite(value):
        raise ValueError(
            f"loss_fn must return a finite number, got {value}: look for a division by zero, a logarithm of zero or an "
            "overflow in it (its inputs are finite), or a learning rate that is too high. Every rank raises this, so a "
            "training loop may catch it and leave the step out on all ranks"
        )
    return value


def leaves_of(outputs: Iterable[Tensor], inputs: Iterable[Tensor] = ()) -> list[Tensor]:
    """Return the leaves of these tensors' graphs that require a gradient; some may be outputs themselves.

    Where inputs are given, they and the graphs behind them are left out.
    """
    tensors, inputs = list(outputs), list(inputs)
    leaves = {id(x): x for x in tensors if x.is_leaf and x.requires_grad}
    visited: set[Any] = {x.grad_fn for x in inputs}
    todo = [x.grad_fn for x in tensors]
    while todo:  # without a call of Python for a node: a graph has thousands
        node = todo.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        for parent, _ in node.next_functions:
            todo.append(parent)
    input_ids = {*map(id, inputs)}
    return [x for name, x in leaves.items() if name not in input_ids]
