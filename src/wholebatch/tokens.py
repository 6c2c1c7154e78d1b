"""Several vectors for each item, such as the token embeddings of a text: padded with a mask, or packed with offsets."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._base.checks import check_dense, is_dense
from ._base.settings import shown


class Tokens(NamedTuple):
    """The vectors of several items, for late interaction.

    Attributes:
        vectors: (items, longest, d), padded; or (n, d) with `offsets`, one item's vectors after the other's.
        mask: (items, longest) booleans, True where there is a vector; None: everywhere.
        offsets: (items + 1,) integers: item i has the vectors from offsets[i] up to offsets[i + 1].

    >>> import torch
    >>> Tokens(torch.zeros(5, 8), offsets=torch.tensor([0, 2, 5])).vectors.shape  # two items
    torch.Size([5, 8])
    """

    vectors: Tensor
    mask: Tensor | None = None
    offsets: Tensor | None = None


class Packed(NamedTuple):
    """Vectors of items one after the other, (n, d), and how many each item has."""

    vectors: Tensor
    lengths: tuple[int, ...]


def packed(name: str, tokens: Tokens, *, names: tuple[str, str] | None = None) -> Packed:
    """Return the vectors without padding. The host reads how many there are of each item.

    Args:
        name: of the argument, for messages.
        tokens: the vectors.
        names: of mask and offsets, for messages.

    Raises:
        ValueError: for other shapes or dtypes, an item without a vector, offsets that do not ascend to the end.
    """
    vectors, mask, offsets = tokens
    mask_name, offset_name = names or (f"{name}.mask", f"{name}.offsets")
    if not isinstance(vectors, Tensor):
        raise ValueError(
            f"{name} must be a tensor (items, tokens, embedding size), or (tokens, embedding size) with {offset_name}, "
            f"got {shown(vectors)}"
            + ("" if names else "; beside a mask or offsets pass wb.Tokens(vectors, mask, offsets)")
        )
    check_dense(name, vectors)
    if offsets is not None:
        if mask is not None:
            raise ValueError(f"{mask_name} must be left out with {offset_name}: packed tokens have no padding")
        if vectors.dim() != 2:
            raise ValueError(
                f"{name} must be packed with {offset_name}, (tokens of all items, embedding size), got "
                f"{tuple(vectors.shape)}; of padded tokens pass {mask_name}"
            )
        return Packed(vectors, _lengths_of_offsets(name, offset_name, offsets, len(vectors)))
    if vectors.dim() != 3:
        raise ValueError(
            f"{name} must have shape (items, tokens, embedding size), or (tokens, embedding size) with {offset_name}, "
            f"got {tuple(vectors.shape)}"
        )
    lengths = [vectors.shape[1]] * len(vectors)
    if mask is not None:
        if not is_dense(mask) or mask.dtype != torch.bool or mask.shape != vectors.shape[:2]:
            got = f"{tuple(mask.shape)}, {mask.dtype}" if is_dense(mask) else shown(mask)
            raise ValueError(
                f"{mask_name} must be booleans of shape {tuple(vectors.shape[:2])}, True where {name} has a token, got "
                f"{got}; of a tokenizer's attention mask pass attention_mask.bool()"
            )
        lengths = mask.sum(1).tolist()
    counts = _checked(name, lengths, "mask it out of the batch, or leave it out")
    flat = vectors.flatten(0, 1)
    if mask is not None and sum(counts) < len(flat):
        flat = flat.index_select(0, mask.to(flat.device).flatten().nonzero()[:, 0])
    return Packed(flat, counts)


def _lengths_of_offsets(name: str, offset_name: str, offsets: object, count: int) -> tuple[int, ...]:
    ends: list[int] = []
    if isinstance(offsets, Tensor) and is_dense(offsets) and offsets.dtype in (torch.int32, torch.int64):
        ends = offsets.tolist() if offsets.dim() == 1 else []
    if not ends or ends[0] != 0 or ends[-1] != count:
        got = f"{tuple(offsets.shape)}, {offsets.dtype}" if is_dense(offsets) else shown(offsets)
        got = f"{ends[0]} to {ends[-1]}" if ends else got
        raise ValueError(
            f"{offset_name} must be integers, one more than there are items, that rise from 0 to the {count} tokens of "
            f"{name}, got {got}; of lengths pass torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"
        )
    assert isinstance(offsets, Tensor)
    return _checked(name, offsets.diff().tolist(), f"each of {offset_name} must be larger than the one before")


def _checked(name: str, lengths: list[int], fix: str) -> tuple[int, ...]:
    """Return the lengths, all of which must be positive."""
    for item, length in enumerate(lengths):
        if length < 1:
            raise ValueError(
                f"{name} must have a token in each item, got {length} in item {item}; over no tokens there is no "
                f"maximum: {fix}"
            )
    return tuple(lengths)
