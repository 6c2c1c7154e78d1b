"""The global batch: a tree whose leaves have the batch's rows, or are the same on all ranks; and splits of its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base import trees
from .._base.checks import is_dense, shown
from .._base.user_error import UserError
from ..partition import Partition


def num_rows(batch: Any) -> int:
    """Return the number of rows of the global batch.

    Raises:
        UserError: if nothing in it has rows, or if two leaves have different numbers of them.
    """
    for name, x in leaves(batch).items():
        if isinstance(x, Tensor) and not is_dense(x):
            raise UserError(f"Problem's batch must hold dense tensors; {name} is {x.layout} on {x.device}, {shown(x)}")
    counts = {name: len(x) for name, x in leaves(batch).items() if _has_rows(x)}
    if not counts:
        raise UserError(
            "Problem's batch must hold tensors, or lists, with a row for each example; it is a tree of them: "
            f"got {type(batch).__name__}"
        )
    if len(set(counts.values())) > 1:
        raise UserError(f"everything in Problem's batch must have the same rows, got {counts}")
    return next(iter(counts.values()))


def leaves(batch: Any) -> dict[str, Any]:
    """Return the leaves by path; a list of texts or numbers is one leaf."""
    return {path or "batch": leaf for path, leaf in trees.leaves(batch, is_leaf=_has_rows)}


def take(batch: Any, rows: Sequence[int], *, but: tuple[str, Sequence[int]] | None = None) -> Any:
    """Return a batch of these rows; the input that `but` names gives other rows."""

    def rows_of(name: str, x: Any) -> Any:
        chosen = but[1] if but is not None and name == but[0] else rows
        if not _has_rows(x):
            return x
        if isinstance(x, Tensor):
            return x[torch.tensor(chosen, dtype=torch.int64)]
        return type(x)([x[row] for row in chosen])

    return _map(rows_of, batch)


def with_gradient(batch: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return the batch with floating-point tensors replaced by leaves that require a gradient, and these leaves."""
    batch_leaves: dict[str, Tensor] = {}

    def leaf_of(name: str, x: Any) -> Any:
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim():
            batch_leaves[name] = x = x.detach().clone().requires_grad_()
        return x

    return _map(leaf_of, batch), batch_leaves


def to_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """Return the batch with its floating-point tensors detached and in the dtype."""

    def converted(_: str, x: Any) -> Any:
        return x.detach().to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return _map(converted, batch)


def _map(function: Callable[[str, Any], Any], batch: Any) -> Any:
    """Return a batch of the same form whose leaves are `function(path, leaf)`."""
    paths = iter(leaves(batch))
    return trees.map_leaves(lambda x: function(next(paths), x), batch, is_leaf=_has_rows)


def splits(rows: int, size: int, *, uneven: bool, empty: bool) -> list[tuple[int, ...]]:
    """Return splits of the rows over ranks: equal parts first, then uneven ones, then one with an empty rank.

    >>> splits(12, 3, uneven=True, empty=True)
    [(4, 4, 4), (2, 4, 6), (6, 0, 6)]
    """
    counts = [Partition.even(rows, size).counts]
    if uneven and rows > size:
        weights = [rank + 1 for rank in range(size)]
        parts = [max(1, rows * weight // sum(weights)) for weight in weights]
        parts[-1] += rows - sum(parts)
        counts.append(tuple(parts))
    if empty and size > 1:
        first, *others = Partition.even(rows, size - 1).counts
        counts.append((first, 0, *others))
    return list(dict.fromkeys(counts))


def _has_rows(x: Any) -> bool:
    if isinstance(x, Tensor):
        return x.dim() > 0
    return isinstance(x, list | tuple) and bool(x) and all(isinstance(value, str | int | float) for value in x)
