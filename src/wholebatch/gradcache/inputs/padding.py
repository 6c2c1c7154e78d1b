"""Representations of tokens, whose number differs between chunks: which of them are filled up, and to which length.

    embeddings (rows, tokens, d)   beside a mask (rows, tokens), an integer or bool tensor

A chunk has as many tokens as its longest row. Without the mask, the loss could not tell tokens from zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

NO_MASK = (
    ", or return beside it the mask of its tokens, a bool or integer tensor of shape (rows, tokens), with which chunks "
    "may have different numbers of tokens"
)


def padded_lengths(reps: Sequence[Sequence[Tensor]]) -> list[int | None]:
    """Return the largest number of tokens of each representation that is filled up, None for the others.

    Args:
        reps: of each chunk, its representations.

    >>> import torch
    >>> short, long = ((torch.ones(2, n, 8), torch.ones(2, n, dtype=torch.bool), torch.ones(2, 4)) for n in (3, 5))
    >>> padded_lengths([short, long])
    [5, 5, None]
    """
    everything = [*zip(*reps, strict=True)]
    lengths: list[int | None] = [None] * len(everything)
    for masks in everything:
        if masks[0].is_floating_point() or masks[0].is_complex() or any(x.dim() != 2 for x in masks):
            continue
        longest = max(x.shape[1] for x in masks)
        if longest == min(x.shape[1] for x in masks):
            continue
        masked = [k for k, parts in enumerate(everything) if _have_mask(parts, masks)]
        if any(everything[k][0].is_floating_point() or everything[k][0].is_complex() for k in masked):
            for k in masked:
                lengths[k] = longest
    return lengths


def _have_mask(parts: Sequence[Tensor], masks: Sequence[Tensor]) -> bool:
    return all(x.shape[:2] == mask.shape for x, mask in zip(parts, masks, strict=True))
