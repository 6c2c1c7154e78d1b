"""The mistakes of a classifier about its test images, and those of them that the pictures do not excuse."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..data.classes.labeled import LabeledImages
from ..data.pictures.pixel_digests import PixelDigests


class Mistakes(NamedTuple):
    """The test images with a wrong class."""

    images: Tensor
    """int64, (n,): places in the test set."""
    are_equal: Tensor
    """bool, (n,): whether the class that was found has an equal image, pixel by pixel."""


def find_mistakes(data: LabeledImages, found: Tensor, digests: PixelDigests) -> Mistakes:
    """Return the test images with a wrong class; reads these, and the images of the classes that were found.

    Args:
        data: labeled images, with the test images among them.
        found: (n,), the class that was found for each test image.
        digests: of the pixels of the data's pictures.
    """
    wrong = (found != data.labels[data.test]).nonzero()[:, 0]
    rows = torch.isin(data.labels, found[wrong]).nonzero()[:, 0]
    known = set(zip(data.labels[rows].tolist(), digests.of(rows), strict=True))
    pairs = zip(found[wrong].tolist(), digests.of(data.test[wrong]), strict=True)
    return Mistakes(wrong, torch.tensor([pair in known for pair in pairs], dtype=torch.bool))


def surest_mistakes(data: LabeledImages, found: Tensor, logits: Tensor, mistakes: Mistakes) -> list[int]:
    """Return the test images with a wrong class, about pictures that differ: the surest first, each pair once."""
    labels = data.labels[data.test]
    wrong = mistakes.images[~mistakes.are_equal]
    by_pair: dict[tuple[int, int], int] = {}
    for i in wrong[logits[wrong].argsort(descending=True)].tolist():
        a, b = int(labels[i]), int(found[i])
        by_pair.setdefault((min(a, b), max(a, b)), i)
    return [*by_pair.values()]
