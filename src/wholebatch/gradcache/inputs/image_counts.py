"""Which images of an input belong to which rows, and which patches to which images.

The images of a batch stand in the order of the rows, each row has any number of them, and an image has any number of
patches. So a choice of rows is a choice of images, and that a choice of patches. The names are those that processors of
transformers use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from torch import Tensor

from ..._base.checks import shown
from .token_budget import is_named


@dataclass(frozen=True)
class RowItems:
    """The images, or videos, of a batch.

    >>> items = RowItems((1, 0, 2), (4, 2, 3))
    >>> items.numbers([0, 2]), items.patch_numbers([2])
    ([0, 1, 2], [4, 5, 6, 7, 8])
    """

    items_per_row: tuple[int, ...]  # the number of images of each row
    patches: tuple[int, ...] | None = None  # the number of patches of each image; None: one

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the images of these rows."""
        return _member_numbers(rows, self.items_per_row)

    def patch_numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the patches of these rows."""
        images = self.numbers(rows)
        return images if self.patches is None else _member_numbers(images, self.patches)


def _member_numbers(chosen: Sequence[int], counts: Sequence[int]) -> list[int]:
    """Return the numbers of all that the chosen have, where each has as many as `counts` says, one after another."""
    starts = [0, *accumulate(counts)]
    return [number for k in chosen for number in range(starts[k], starts[k + 1])]


def counted(tokens_of_rows: Sequence[int], tokens_of_items: Sequence[int], name: str = "image") -> tuple[int, ...]:
    """Return how many images each row has, given the image tokens of each row and of each image.

    Raises:
        ValueError: if the tokens of a row are not those of the next images.

    >>> counted([4, 0, 5], [4, 2, 3])
    (1, 0, 2)
    """
    counts, used = [], 0
    for row, tokens in enumerate(tokens_of_rows):
        first, so_far = used, 0
        while so_far < tokens and used < len(tokens_of_items):
            so_far += tokens_of_items[used]
            used += 1
        if so_far != tokens:
            left = [*tokens_of_items[first : first + 3]]
            more = ", ..." if first + 3 < len(tokens_of_items) else ""
            raise ValueError(
                f"row {row} has {tokens} {name} tokens, and the next {name}s, from number {first} of "
                f"{len(tokens_of_items)} on, take {left or 'none'}{more}: is the text truncated within an {name}'s "
                f"tokens, or merge_size= or {name}_token_id= not the model's? {name}s_per_row= gives the number of "
                f"{name}s of each row without tokens"
            )
        counts.append(used - first)
    if used < len(tokens_of_items):
        raise ValueError(
            f"the rows have tokens of {used} {name}s, and there are {len(tokens_of_items)} {name}s: is "
            f"{name}_token_id= that of the model's config, or a text truncated?"
        )
    return (*counts,)


INPUT = "the input of a MultimodalSplit"
OF_ROWS = ("input_ids", "attention_mask", "inputs_embeds")  # tensors that certainly have the batch's rows


@dataclass(frozen=True)
class Kind:
    """The names of one kind of pixels in an input."""

    name: str  # image or video
    pixels: str  # the tensor of pixels
    grid: str  # the tensor of the numbers of patches in time, height and width
    others: tuple[str, ...]  # further tensors with one row for each image
    per_row: str | None  # the tensor of the numbers of images of the rows
    token: int | None  # stands for each part of an image

    @property
    def names(self) -> tuple[str, ...]:
        """All names of this kind."""
        return (self.pixels, self.grid, *self.others)


def named(by_path: Mapping[str, Any], name: str) -> Any:
    """Return the leaf of this name, or None; raise ValueError if there are several."""
    paths = [path for path in by_path if is_named(path, name)]
    if len(paths) > 1:
        raise ValueError(f"{INPUT} must have one {name!r}, got {', '.join(paths)}: pass one mapping for each model")
    return by_path[paths[0]] if paths else None


def rows_in(by_path: Mapping[str, Any]) -> int:
    """Return the number of rows of the batch; raise ValueError if no tensor shows it, or two disagree."""
    sizes = {name: named(by_path, name) for name in OF_ROWS}
    rows = {name: len(x) for name, x in sizes.items() if isinstance(x, Tensor) and x.dim()}
    if not rows or len({*rows.values()}) > 1:
        raise ValueError(
            f"{INPUT} must hold input_ids, an attention_mask or inputs_embeds, all with the batch's rows; got "
            f"{', '.join(f'{name} with {count} rows' for name, count in rows.items()) or [*by_path]}"
        )
    return next(iter(rows.values()))


def items_of(by_path: Mapping[str, Any], kind: Kind, rows: int, merge_size: int) -> RowItems:
    """Return how many images each row has, and how many patches each image; raise ValueError if they do not add up."""
    patches = _patches(by_path, kind)
    sizes = {
        name: len(x)
        for name in kind.names
        if (x := named(by_path, name)) is not None and (name != kind.pixels or patches is None)
    }
    if len({*sizes.values()}) > 1:
        raise ValueError(
            f"{INPUT} must have one number of {kind.name}s, got "
            f"{', '.join(f'{name} with {count}' for name, count in sizes.items())}"
        )
    total = next(iter(sizes.values()))
    if kind.per_row is not None:
        return RowItems(_counts_of_rows(by_path, kind, rows, kind.per_row, total), patches)
    if kind.token is None:
        if total != rows:
            raise ValueError(
                f"{INPUT} has {total} {kind.name}s and {rows} rows: to count the {kind.name}s of each row give "
                f"{kind.name}_token_id= (it is in the model's config), or {kind.name}s_per_row="
            )
        return RowItems((1,) * rows, patches)
    ids = named(by_path, "input_ids")
    if not isinstance(ids, Tensor):
        raise ValueError(
            f"{kind.name}_token_id={kind.token} is counted in input_ids, and {INPUT} has only {[*by_path]}"
        )
    tokens_of_rows = (ids == kind.token).flatten(1).sum(1).tolist()
    return RowItems(
        counted(tokens_of_rows, _tokens(tokens_of_rows, kind, total, patches, merge_size), kind.name), patches
    )


def _patches(by_path: Mapping[str, Any], kind: Kind) -> tuple[int, ...] | None:
    """Return the number of patches of each image, or None if there is no grid."""
    pixels, grid = named(by_path, kind.pixels), named(by_path, kind.grid)
    if grid is None:
        return None
    if not isinstance(grid, Tensor) or grid.dim() != 2 or grid.shape[1] != 3 or grid.is_floating_point():
        got = f"{tuple(grid.shape)} of {grid.dtype}" if isinstance(grid, Tensor) else shown(grid)
        raise ValueError(f"{kind.grid} must hold integers of shape ({kind.name}s, 3), got {got}")
    patches = (*(math.prod(thw) for thw in grid.tolist()),)
    if isinstance(pixels, Tensor) and sum(patches) != len(pixels):
        raise ValueError(
            f"{kind.pixels} must have the patches of {kind.grid}, {sum(patches)} for {len(patches)} {kind.name}s; got "
            f"{len(pixels)} rows"
        )
    return patches


def _tokens(tokens: Sequence[int], kind: Kind, total: int, patches: Sequence[int] | None, merge_size: int) -> list[int]:
    """Return the number of tokens of each image."""
    if patches is None:
        if total and sum(tokens) % total:
            raise ValueError(
                f"{INPUT} has {sum(tokens)} {kind.name} tokens and {total} {kind.name}s, which so have not the same "
                f"number of tokens: give {kind.name}s_per_row="
            )
        return [sum(tokens) // max(total, 1)] * total
    square = merge_size**2
    for number, count in enumerate(patches):
        if count % square:
            raise ValueError(
                f"{kind.name} {number} has {count} patches, not a multiple of merge_size^2 = {square}: merge_size= is "
                "config.vision_config.spatial_merge_size"
            )
    return [count // square for count in patches]


def _counts_of_rows(by_path: Mapping[str, Any], kind: Kind, rows: int, name: str, total: int) -> tuple[int, ...]:
    counts = named(by_path, name)
    whole = isinstance(counts, Tensor) and not counts.is_floating_point() and counts.shape == (rows,)
    numbers = counts.tolist() if whole else []
    if not whole or sum(numbers) != total or min(numbers, default=0) < 0:
        got = f"shape {tuple(counts.shape)} of {counts.dtype}" if isinstance(counts, Tensor) else shown(counts)
        got = f"{shown(numbers)}, together {sum(numbers)}" if whole else got
        raise ValueError(
            f"{kind.name}s_per_row names {name!r}, which must be a tensor of {rows} integers, for each row the number "
            f"of its {kind.name}s, {total} together; got {got}"
        )
    return (*numbers,)
