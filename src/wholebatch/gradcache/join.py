"""All rows of a model's representations in one tensor, from those of its chunks.

Rows are in the order of the input. A representation of tokens, (rows, tokens, d) beside a mask (rows, tokens) of bools
or integers, may have other numbers of tokens in each chunk: it is filled up with zeros. Without the mask, the loss
could not tell tokens from zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .chunks import Chunk, Index, differentiable
from .inputs.parts import Part, index_of


def joined(chunks: Sequence[Chunk]) -> list[Tensor]:
    """Return all rows of each representation as a leaf, and note the place of each chunk in it.

    A representation that differs from another chunk's in more than rows and masked tokens is a ValueError.
    """
    name, leaves = chunks[0].encoder.name, []
    places: list[list[Index]] = []  # of each chunk, for each representation
    lengths = padded_lengths([chunk.reps for chunk in chunks])
    for number, (parts, length) in enumerate(
        zip(zip(*(chunk.reps for chunk in chunks), strict=True), lengths, strict=True)
    ):
        alike = {(x.dtype, x.device, x.dim(), x.shape[1 if length is None else 2 :]) for x in parts}
        if len(alike) > 1:
            raise ValueError(
                f"representation {number} of {name} must have the same shape in all chunks, but for its rows, and the "
                f"same dtype and device; got {[(*x.shape, x.dtype) for x in parts]}: pad to one length, or return "
                "beside it the mask of its tokens, a bool or integer tensor of shape (rows, tokens), with which chunks "
                "may have different numbers of tokens"
            )
        if not parts[0].dim() and any(not torch.equal(x, parts[0]) for x in parts):
            raise ValueError(
                f"representation {number} of {name} has shape (), one number for all rows, and must "
                f"be the same in every chunk; got {[x.item() for x in parts]}. Numbers of rows have shape (rows,)"
            )
        places.append(_places(chunks, parts, length))
        leaves.append(_join([x.detach() for x in parts], places[-1], length))
    for chunk, *chunk_places in zip(chunks, *places, strict=True):
        chunk.places = chunk_places
        if not chunk.kept:
            chunk.reps = tuple(x[place] if x.dim() else x for x, place in zip(leaves, chunk.places, strict=True))
    trained = chunks[0].encoder.trained or [differentiable(leaf) for leaf in leaves]
    return [leaf.detach().requires_grad_(needs_grad) for leaf, needs_grad in zip(leaves, trained, strict=True)]


def _places(chunks: Sequence[Chunk], parts: Sequence[Tensor], length: int | None) -> list[Index]:
    """Return where each chunk's part of a representation stands among all rows, of `length` tokens if that differs."""
    counts = [len(x) if x.dim() else 0 for x in parts]
    numbers = numbers_of_rows([chunk.chunk_input for chunk in chunks], counts)
    rows = [index_of(part_rows, x.device) for part_rows, x in zip(numbers, parts, strict=True)]
    if length is None:
        return [*rows]
    return [(index, slice(x.shape[1])) for index, x in zip(rows, parts, strict=True)]


def numbers_of_rows(parts: Sequence[Part], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the numbers of each part's rows, of which there are `counts`."""
    start = 0
    for part, count in zip(parts, counts, strict=True):
        yield range(start, start + count) if part.rows is None else part.rows
        start += count


def _join(parts: Sequence[Tensor], places: Sequence[Index], length: int | None) -> Tensor:
    """Return a tensor of all rows."""
    first, slices = parts[0], [place for place in places if isinstance(place, slice)]
    if not first.dim() or (len(parts) == 1 and slices):
        return first
    if len(slices) == len(parts):
        order = sorted(range(len(parts)), key=lambda k: (slices[k].start, slices[k].stop))
        return torch.cat([parts[k] for k in order])
    rest = first.shape[1:] if length is None else (length, *first.shape[2:])
    whole = first.new_zeros(sum(map(len, parts)), *rest)
    for x, place in zip(parts, places, strict=True):
        whole[place] = x
    return whole


def padded_lengths(reps: Sequence[Sequence[Tensor]]) -> list[int | None]:
    """Return the largest number of tokens of each representation that is filled up, None for the others.

    >>> import torch
    >>> short, long = ((torch.ones(2, n, 8), torch.ones(2, n, dtype=torch.bool), torch.ones(2, 4)) for n in (3, 5))
    >>> padded_lengths([short, long])
    [5, 5, None]
    """
    everything = [*zip(*reps, strict=True)]
    lengths: list[int | None] = [None] * len(everything)
    for masks in everything:
        if differentiable(masks[0]) or any(x.dim() != 2 for x in masks):
            continue
        longest = max(x.shape[1] for x in masks)
        if longest == min(x.shape[1] for x in masks):
            continue
        masked = [k for k, parts in enumerate(everything) if _have_mask(parts, masks)]
        if any(differentiable(everything[k][0]) for k in masked):
            for k in masked:
                lengths[k] = longest
    return lengths


def _have_mask(parts: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    return all(x.shape[:2] == mask.shape for x, mask in zip(parts, masks, strict=True))
