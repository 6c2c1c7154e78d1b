"""The input of one chunk, and the numbers of the rows in it.

A part that holds rows in another order than the input's is a copy of them. It is made when a forward pass needs it, so
that the inputs of all chunks are not in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._base.checks import check_sequence, shown
from ..._base.trees import leaves, map_leaves, map_leaves_by_path, tensors_of
from .token_budget import TokenBudget, TokenChunk, is_named, mask_in
from .trees import check_input


@dataclass(frozen=True, eq=False)
class InputChunk:
    """A chunk whose rows may stand in any order: an item of the list that a `split_input_fn` returns.

    The representations of all chunks come back in the order of the rows.

    Args:
        input: the chunk, which the model takes.
        rows: the numbers of its rows in the whole input.

    Raises:
        ValueError: if rows are not integers of at least 0, each once.

    >>> import torch, wholebatch as wb
    >>> x = torch.tensor([[1.0], [2.0], [3.0]])
    >>> [wb.gradcache.InputChunk(x[rows], rows).input.tolist() for rows in ([0, 2], [1])]
    [[[1.0], [3.0]], [[2.0]]]
    """

    input: object
    rows: Sequence[int]

    def __post_init__(self) -> None:
        rows = check_sequence("rows", self.rows, "the numbers of a chunk's rows")
        whole = all(isinstance(row, int) and not isinstance(row, bool) and row >= 0 for row in rows)
        if not whole or len({*rows}) != len(rows):
            raise ValueError(f"rows must be integers of at least 0, each once; got {shown(self.rows)}")
        object.__setattr__(self, "rows", (*rows,))


class Part:
    """The input of a chunk: a tree whose rows follow those of the chunk before, or some rows of a whole input."""

    def __init__(
        self,
        tree: Any,  # the input of the model; with `cut`, the whole input
        rows: Sequence[int] | None = None,  # their numbers; None: those that follow
        columns: slice = slice(None),  # of the tokens of these rows, for `cut`
        *,
        cut: Callable[[Any, TokenChunk], Any] | None = None,  # returns the input of the model whenever it is asked for
        holds: Sequence[str] = (),  # what not every part has, such as images, and a layer of the model reads
    ) -> None:
        self._tree, self.rows, self._columns, self._cut, self.holds = tree, rows, columns, cut, holds

    @property
    def tree(self) -> Any:
        """The tree of tensors that the model takes."""
        if self._cut is None:
            return self._tree
        return self._cut(self._tree, TokenChunk((*(self.rows or ()),), self._columns))

    @property
    def may_be_empty(self) -> bool:
        """Whether there can be a part without rows like this one: it has tensors with rows, numbers and the like."""
        values = leaves(self._tree, is_leaf=lambda x: isinstance(x, list | tuple) and not x)
        return all(isinstance(value, Tensor | int | float | None) for _, value in values)

    def emptied(self) -> Part:
        """Return a part without rows like this one."""
        tree = _rows_of_tree(self._tree, slice(0, 0)) if self._cut is None else self._tree
        return Part(tree, None if self.rows is None else (), self._columns, cut=self._cut)


def parts_of(split: object, tree: Any, name: str) -> list[Part]:
    """Return the parts that a split_input_fn has made of an input.

    Unless they have each row of the input once, as far as tensors and numbers of rows show it, this raises ValueError.
    """
    if not isinstance(split, Iterable):
        raise ValueError(f"split_input_fn must return a list of chunks of {name}, got {shown(split)}")
    parts = [
        Part(x.input, x.rows) if isinstance(x, InputChunk) else x if isinstance(x, Part) else Part(x) for x in split
    ]
    if not parts:
        raise ValueError(f"{name} was split into no chunks; for no rows give one chunk without rows")
    numbers = [part.rows for part in parts if part.rows is not None]
    if 0 < len(numbers) < len(parts):
        raise ValueError(
            f"{name} was split into {len(numbers)} InputChunks and {len(parts) - len(numbers)} other chunks: either "
            "all chunks have the numbers of their rows, or none has"
        )
    sizes = _sizes_in(tree)
    if numbers:
        ordered = sorted(row for part_rows in numbers for row in part_rows)
        rows = sizes.pop() if len(sizes) == 1 else len(ordered)
        if ordered != [*range(rows)]:
            raise ValueError(
                f"the InputChunks of {name} must have each of its {rows} rows once, with numbers from 0; got rows "
                f"{shown(ordered)}"
            )
        return parts
    sizes_of_parts = [_sizes_in(part.tree) for part in parts]
    if all(len(tree_sizes) == 1 for tree_sizes in (sizes, *sizes_of_parts)):
        counts, rows = [part_sizes.pop() for part_sizes in sizes_of_parts], sizes.pop()
        if sum(counts) != rows:
            raise ValueError(
                f"{name} has {rows} rows, its chunks have {counts}: split_input_fn must give all of them, once"
            )
    return parts


def _sizes_in(tree: Any) -> set[int]:
    return {len(x) for x in tensors_of(tree) if x.dim()}


def index_of(numbers: Sequence[int], device: torch.device) -> slice | Tensor:
    """Return the index that selects these numbers: a slice, which copies nothing, if they follow each other."""
    start = numbers[0] if numbers else 0
    if (*numbers,) == (*range(start, start + len(numbers)),):
        return slice(start, start + len(numbers))
    return torch.tensor(numbers, device=device)


def split_tree(tree: Any, chunk_size: int | TokenBudget, name: str) -> list[Part]:
    """Return the parts of a tree of tensors with the batch's rows: of so many rows each, or by a budget of tokens.

    Parts of so many rows are in order; an empty batch has one empty part.

    >>> import torch
    >>> [part.tree["x"].tolist() for part in split_tree({"x": torch.arange(3), "scale": 2.0}, 2, "the input")]
    [[0, 1], [2]]
    >>> tree = {"ids": torch.tensor([[1, 2], [3, 0]]), "mask": torch.tensor([[1, 1], [1, 0]])}
    >>> [part.tree["ids"].tolist() for part in split_tree(tree, TokenBudget(2, mask="mask"), "the input")]
    [[[1, 2]], [[3]]]

    Raises:
        ValueError: with this name of the input, if it cannot be cut.
    """
    if not isinstance(chunk_size, TokenBudget):
        starts = range(0, max(check_input(tree, name, chunk_size), 1), chunk_size)
        return [Part(_rows_of_tree(tree, slice(start, start + chunk_size))) for start in starts]
    check_input(tree, name, 1)
    budget, mask = chunk_size, mask_in(tree, chunk_size, name)

    def cut(whole: Any, chunk: TokenChunk) -> Any:
        return map_leaves_by_path(lambda path, x: cut_tensor(path, x, chunk, budget, mask.shape[1]), whole)

    return [Part(tree, *chunk, cut=cut) for chunk in budget.chunks(mask)]


def _rows_of_tree(tree: Any, rows: slice) -> Any:
    return map_leaves(lambda x: x[rows] if isinstance(x, Tensor) and x.dim() else x, tree)


def cut_tensor(path: str, x: Any, chunk: TokenChunk, budget: TokenBudget | None, length: int, dim: int = 0) -> Any:
    """Return the chunk's rows of a tensor, in dimension `dim`, and of rows of this length its columns, in the next one.

    Without a budget, and where it names this tensor as uncut, all columns stay. Other things stay whole.
    """
    if not isinstance(x, Tensor) or not x.dim():
        return x
    is_cut = budget is not None and not any(is_named(path, name) for name in budget.uncut)
    whole = (slice(None),) * dim
    if is_cut and x.dim() > dim + 1 and x.shape[dim + 1] == length:
        columns = *whole, slice(None), chunk.columns
        x = x[columns]
    rows = *whole, index_of(chunk.rows, x.device)
    return x[rows]
