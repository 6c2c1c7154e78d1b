"""Which images belong to which rows, and which patches to which images, as integers.

The images of a batch stand in the order of the rows, each row has any number of them, and an image has any number of
patches. So a choice of rows is a choice of images, and that a choice of patches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class RowItems:
    """The images, or videos, of a batch.

    Args:
        of_rows: the number of images of each row.
        patches: the number of patches of each image, or None: one.

    >>> items = RowItems((1, 0, 2), (4, 2, 3))
    >>> items.numbers([0, 2]), items.patch_numbers([2])
    ([0, 1, 2], [4, 5, 6, 7, 8])
    """

    of_rows: tuple[int, ...]
    patches: tuple[int, ...] | None = None

    def numbers(self, rows: Sequence[int]) -> list[int]:
        """Return the numbers of the images of these rows."""
        return _member_numbers(rows, self.of_rows)

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
