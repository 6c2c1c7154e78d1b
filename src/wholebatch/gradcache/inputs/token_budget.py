"""Chunks by a budget of tokens: which rows and which columns of a padded input each chunk holds, as integers.

Rows are sorted by length, longest first, and a chunk takes rows as long as

    rows x columns <= tokens,        columns: from the first to the last that has a token in one of the rows

Of all chunks of rows in this order, these are the fewest. The longest rows come first, so that a chunk that does not
fit into memory shows at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from torch import Tensor

from ..._base.checks import check_count, check_dense, check_flag, check_items, shown
from ..._base.settings import shown_with_type
from ..._base.trees import leaves

Span = tuple[int, int]  # a row's tokens lie in columns start, ..., stop - 1; (0, 0) has none


class TokenChunk(NamedTuple):
    """A chunk of a padded input, in integers.

    Args:
        rows: the numbers of its rows.
        columns: the columns of its tokens; the others are padding in all of its rows.
    """

    rows: tuple[int, ...]
    columns: slice


@dataclass(frozen=True)
class TokenBudget:
    """Chunks with a limited number of tokens, padding included, for inputs whose rows differ in length.

    Rows are grouped by length, and padding that all rows of a chunk have is cut off, so that little of it is computed.
    The loss gets the representations in the order of the input. A row longer than the budget is a chunk of its own.

    Every tensor of shape (rows, length, ...) is cut, where length is that of the mask. The representation of a row must
    not depend on its padding: with `attention_mask` this holds for the encoders of transformers. If padding comes first
    and a model counts its positions from the first column, padding included, pass `position_ids` in the input, which
    are cut as well, or `cut_left=False`.

    Args:
        tokens: rows times columns of a chunk, at most.
        mask: the name of the mask in the input, of shape (rows, length): not zero where there is a token. In an input
            that is a list, a path such as "[1]" or "[0].attention_mask" names it.
        max_rows: rows of a chunk, at most; None: no limit but tokens.
        cut_left: whether to cut off padding before the tokens of a chunk, not only padding after them.
        uncut: names of tensors whose second size is the mask's length by chance, and stays: another sequence's tokens.

    Raises:
        ValueError: if an argument is invalid.

    >>> import torch, wholebatch as wb
    >>> budget = wb.gradcache.TokenBudget(6)
    >>> for chunk in budget.chunks(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0]])):
    ...     print(chunk.rows, chunk.columns)
    (1,) slice(0, 4, None)
    (0, 3) slice(0, 3, None)
    (2,) slice(0, 1, None)
    """

    tokens: int
    _: KW_ONLY
    mask: str = "attention_mask"
    max_rows: int | None = None
    cut_left: bool = True
    uncut: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_count("tokens", self.tokens, "rows times columns of a chunk")
        check_tensor_name("mask", self.mask)
        if self.max_rows is not None:
            check_count("max_rows", self.max_rows, "rows of a chunk")
        check_flag("cut_left", self.cut_left)
        for name in check_items("uncut", self.uncut, "names of tensors"):
            check_tensor_name("uncut", name)
        object.__setattr__(self, "uncut", (*self.uncut,))

    def chunks(self, mask: Tensor) -> tuple[TokenChunk, ...]:
        """Return the chunks of an input with this mask; without rows, one chunk without rows.

        Args:
            mask: of shape (rows, length), not zero where there is a token.

        Raises:
            ValueError: if it is no such tensor.
        """
        check_mask("mask", mask)
        return planned(spans_of(mask, left=self.cut_left), self.tokens, self.max_rows)


def mask_in(tree: Any, budget: TokenBudget, name: str) -> Tensor:
    """Return the mask of an input; raise ValueError if there is none, or several, or it has another shape."""
    tensors = {path: x for path, x in leaves(tree) if isinstance(x, Tensor)}
    paths = [path for path in tensors if is_named(path, budget.mask)]
    if len(paths) != 1:
        raise ValueError(
            f"chunk_sizes has a TokenBudget with mask={budget.mask!r}, and {name} must hold one tensor of this name, "
            f"got {len(paths)}: its tensors are {', '.join(path or 'without a name' for path in tensors)}. "
            "TokenBudget(..., mask=) names another (or its path); for an input without a mask give a number of rows"
        )
    for left in budget.uncut:
        if not any(is_named(path, left) for path in tensors):
            raise ValueError(f"uncut of a TokenBudget names {left!r}, and {name} has only {', '.join(tensors)}")
    check_mask(f"{paths[0]!r} of {name}", tensors[paths[0]])
    return tensors[paths[0]]


def is_named(path: str, name: str) -> bool:
    """Return whether a leaf of a tree has this name, or this path."""
    return path == name or path.endswith(f".{name}")


def check_mask(name: str, mask: object) -> None:
    """Raise ValueError unless it is a tensor that can mark tokens."""
    if not isinstance(mask, Tensor):
        raise ValueError(f"{name} must be a tensor of shape (rows, length), got {shown_with_type(mask)}")
    check_dense(name, mask)
    if mask.dim() != 2 or mask.is_complex():
        raise ValueError(
            f"{name} must have shape (rows, length), not zero where there is a token; got shape {tuple(mask.shape)} of "
            f"{mask.dtype}"
        )


def check_tensor_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be the name of a tensor in the input, got {shown(value)}")


def spans_of(mask: Tensor, *, left: bool) -> list[Span]:
    """Return the columns of each row's tokens; without `left`, from the first column on. The host waits once."""
    rows, length = mask.shape
    if not length:
        return [(0, 0)] * rows
    present = (mask != 0).int()
    first, stop = present.argmax(1), length - present.flip(1).argmax(1)
    return [
        (start if left else 0, stop) if some else (0, 0)
        for start, stop, some in zip(first.tolist(), stop.tolist(), present.any(1).tolist(), strict=True)
    ]


def planned(spans: Sequence[Span], tokens: int, max_rows: int | None = None) -> tuple[TokenChunk, ...]:
    """Return the chunks of rows with these spans.

    >>> for chunk in planned([(0, 1), (0, 3), (0, 2), (0, 1)], 6):
    ...     print(chunk.rows, chunk.columns)
    (1, 2) slice(0, 3, None)
    (0, 3) slice(0, 1, None)
    """
    chunks: list[TokenChunk] = []
    rows: list[int] = []
    span: Span = (0, 0)
    for row in sorted(range(len(spans)), key=lambda row: (spans[row][0] - spans[row][1], *spans[row])):
        wider = _union(span, spans[row])
        if rows and ((len(rows) + 1) * _width(wider) > tokens or len(rows) == max_rows):
            chunks.append(_chunk(rows, span))
            rows, wider = [], spans[row]
        rows.append(row)
        span = wider
    return (*chunks, _chunk(rows, span))


def even(rows: int, size: int) -> tuple[TokenChunk, ...]:
    """Return chunks of at most `size` rows, in order, with all columns; without rows, one chunk without rows."""
    starts = range(0, max(rows, 1), size)
    return tuple(TokenChunk((*range(start, min(start + size, rows)),), slice(None)) for start in starts)


def _chunk(rows: Sequence[int], span: Span) -> TokenChunk:
    start, stop = span
    return TokenChunk((*sorted(rows),), slice(start, max(stop, start + 1)))  # a model sees at least one column


def _union(a: Span, b: Span) -> Span:
    if a == (0, 0) or b == (0, 0):
        return max(a, b)
    return min(a[0], b[0]), max(a[1], b[1])


def _width(span: Span) -> int:
    return max(span[1] - span[0], 1)
