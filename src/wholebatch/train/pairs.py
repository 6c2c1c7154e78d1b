"""(image, text) pairs in memory, split by text, and batches that are a function of (seed, step) alone.

Equal texts are one entry. A pass over the data visits each text once, with one of its images chosen at random, so a
text never meets itself inside a batch as a false negative. Because the batch of a step depends on nothing but the seed
and the step, it is the same on any number of ranks and after a resume.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .randomness import seeded


@dataclass(frozen=True)
class Pairs:
    """Images, those of a text together: `images[first[t] : first[t + 1]]` belong to `texts[t]`."""

    images: Tensor
    """uint8, (number of images, channels, size, size)."""
    texts: tuple[str, ...]
    first: Tensor
    """int64, (number of texts + 1,)."""

    @classmethod
    def grouped_by_text(cls, images: Tensor, texts: list[str]) -> Pairs:
        """Group images by their text; the order of texts and of the images of a text is kept."""
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
    """Texts, by index, in three disjoint parts."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_by_text(pairs: Pairs, *, validation: int, test: int, seed: int) -> Split:
    """A random split: no text of one part occurs in another, so retrieval is tested on texts never seen."""
    order = torch.randperm(len(pairs), generator=seeded(seed, "split"))
    return Split(
        train=order[validation + test :],
        validation=order[test : test + validation].sort().values,
        test=order[:test].sort().values,
    )


def batch_of_step(texts: Tensor, pairs: Pairs, *, batch_size: int, step: int, seed: int) -> tuple[Tensor, Tensor]:
    """The (image indices, text indices) of the global batch of `step`; a pass's incomplete last batch is left out."""
    passed, position = divmod(step, len(texts) // batch_size)
    order = torch.randperm(len(texts), generator=seeded(seed, "order", passed))
    batch = texts[order[position * batch_size : (position + 1) * batch_size]]
    choice = torch.rand(batch_size, generator=seeded(seed, "image", step), dtype=torch.float64)
    first, count = pairs.first[batch], pairs.first[batch + 1] - pairs.first[batch]
    return first + (choice * count).long(), batch
