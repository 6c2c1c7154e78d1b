"""What can be seen of a loss and of the graph behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def checked_loss(loss: Any) -> Tensor:
    """The loss, if it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn must return a tensor of one element, got {got}; reduce it, e.g. by .mean()")
    return loss


def leaves_of(outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves of the graph of these tensors that require a gradient."""
    found: list[Tensor] = []
    seen: set[Any] = set()
    todo = [x.grad_fn for x in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        todo += [parent for parent, _ in node.next_functions]
    return found
