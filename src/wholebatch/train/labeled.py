"""Images of known classes in memory, and batches that are a function of (seed, step) alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._user_error import UserError
from .pairs import Pairs
from .randomness import seeded

_HELD_OUT = 2  # images of a text of a file that are kept for the test, where it has more


@dataclass(frozen=True)
class LabeledImages:
    """Images, the class of each, and which are for what."""

    images: Tensor
    """uint8, (n, channels, size, size)."""
    labels: Tensor
    """int64, (n,): indices of `names`."""
    names: tuple[str, ...]
    """Of the classes."""
    train: Tensor
    """Indices of images."""
    validation: Tensor
    test: Tensor
    what_is_new: str = "images never seen"
    """What the test set is of: of faces, or just images, that are not in training."""

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    def example(self, label: int) -> Tensor:
        """The first image of a class in training."""
        return self.images[self.train[self.labels[self.train] == label][0]]


def with_split(
    images: Tensor,
    names: list[str],
    for_test: Tensor,
    *,
    validation: int,
    seed: int,
    what_is_new: str = "images never seen",
) -> LabeledImages:
    """Classes are the names of images that are not `for_test` (n,); of `validation` classes one of these is kept apart.

    Images for the test whose name is no class are left out.
    """
    known = {name: index for index, name in enumerate(sorted({names[i] for i in (~for_test).nonzero()[:, 0].tolist()}))}
    labels = torch.tensor([known.get(name, -1) for name in names])
    train = (~for_test).nonzero()[:, 0]
    count = torch.bincount(labels[train], minlength=len(known))
    able = (count > 1).nonzero()[:, 0]
    if len(able) < validation:
        raise UserError(
            f"--validation-texts {validation} needs as many texts with two images to train on, got {len(able)}"
        )
    chosen = able[torch.randperm(len(able), generator=seeded(seed, "validation"))[:validation]]
    order = train[torch.randperm(len(train), generator=seeded(seed, "validation images"))]
    by_class = order[labels[order].argsort(stable=True)]
    first = by_class[count.cumsum(0) - count]  # an image of each class, at random
    held = first[chosen].sort().values
    test = (for_test & (labels >= 0)).nonzero()[:, 0]
    if not len(test):
        raise UserError("there is no image to test with: a text needs three images or more, of which two are kept")
    return LabeledImages(images, labels, tuple(known), train[~torch.isin(train, held)], held, test, what_is_new)


def classes_of_texts(pairs: Pairs, *, validation: int, seed: int) -> LabeledImages:
    """Each text is a class; of one with three images or more, the last two are for the test."""
    counts = pairs.first.diff()
    text = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    place = torch.arange(len(text)) - pairs.first[text]
    for_test = (counts[text] > _HELD_OUT) & (place >= counts[text] - _HELD_OUT)
    names = [pairs.texts[i] for i in text.tolist()]
    return with_split(pairs.images, names, for_test, validation=validation, seed=seed)


def images_of_step(data: LabeledImages, *, batch_size: int, step: int, seed: int) -> Tensor:
    """Indices of the images of the step's global batch; a pass's incomplete last batch is left out."""
    passed, position = divmod(step, len(data.train) // batch_size)
    order = torch.randperm(len(data.train), generator=seeded(seed, "order", passed))
    return data.train[order[position * batch_size : (position + 1) * batch_size]]
