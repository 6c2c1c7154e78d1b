"""(image, text) pairs in memory, split by text, and batches that are a function of (seed, step) alone.

Equal texts are one entry. A pass over the data visits each text once, with one of its images chosen at random, so a
text is never its own false negative within a batch. The batch of a step depends only on the seed and the step, so it is
the same on any number of ranks and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import seeded


@dataclass(frozen=True)
class Pairs:
    """Images grouped by text: `images[first[t] : first[t + 1]]` belong to `texts[t]`."""

    images: Tensor
    """uint8, (number of images, channels, size, size)."""
    texts: tuple[str, ...]
    first: Tensor
    """int64, (number of texts + 1,)."""

    @classmethod
    def grouped_by_text(cls, images: Tensor, texts: list[str]) -> Pairs:
        """Group images by text; keep the order of the texts and of the images of each text."""
        distinct = {text: index for index, text in enumerate(dict.fromkeys(texts))}
        owner = torch.tensor([distinct[text] for text in texts])
        order = torch.argsort(owner, stable=True)
        counts = torch.bincount(owner, minlength=len(distinct))
        return cls(images[order], tuple(distinct), torch.cat([counts.new_zeros(1), counts.cumsum(0)]))

    def __len__(self) -> int:
        """Number of texts."""
        return len(self.texts)


@dataclass(frozen=True)
class Split:
    """Indices of texts in three disjoint parts."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_by_text(pairs: Pairs, *, validation: int, test: int, seed: int) -> Split:
    """Split the texts at random. No text is in two parts, so retrieval is tested on texts never seen."""
    order = torch.randperm(len(pairs), generator=seeded(seed, "split"))
    return Split(
        train=order[validation + test :],
        validation=order[test : test + validation].sort().values,
        test=order[:test].sort().values,
    )


def batch_of_step(texts: Tensor, pairs: Pairs, *, batch_size: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return (image indices, text indices) of the step's global batch; a pass leaves out its incomplete last batch."""
    passed, position = divmod(step, len(texts) // batch_size)
    order = torch.randperm(len(texts), generator=seeded(seed, "order", passed))
    batch = texts[order[position * batch_size : (position + 1) * batch_size]]
    choice = torch.rand(batch_size, generator=seeded(seed, "image", step), dtype=torch.float64)
    first, count = pairs.first[batch], pairs.first[batch + 1] - pairs.first[batch]
    return first + (choice * count).long(), batch
