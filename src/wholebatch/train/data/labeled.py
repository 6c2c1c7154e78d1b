"""Images with class labels in memory, and batches that are a function of (seed, step) alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..._user_error import UserError
from .pairs import Pairs
from .randomness import seeded

_HELD_OUT = 2  # images of a text in a file that are held out for the test, if it has more


@dataclass(frozen=True)
class LabeledImages:
    """Images, the class of each, and their split."""

    images: Tensor
    """uint8, (n, channels, size, size)."""
    labels: Tensor
    """int64, (n,): indices of `names`."""
    names: tuple[str, ...]
    """Names of the classes."""
    train: Tensor
    """Indices of images; so are the next two."""
    validation: Tensor
    test: Tensor
    novelty: str = "images never seen"
    """How the test set differs from the training set, in words."""

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    def example(self, label: int) -> Tensor:
        """Return the first image of a class in training."""
        return self.images[self.train[self.labels[self.train] == label][0]]


def with_split(
    images: Tensor,
    names: list[str],
    for_test: Tensor,
    *,
    validation: int,
    seed: int,
    novelty: str = "images never seen",
) -> LabeledImages:
    """Split images whose classes are the names of those that are not `for_test`, a mask of (n,).

    For the validation, one such image of each of `validation` classes is held out. Test images of other names are left
    out.
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
    first = by_class[count.cumsum(0) - count]  # a random image of each class
    held = first[chosen].sort().values
    test = (for_test & (labels >= 0)).nonzero()[:, 0]
    if not len(test):
        raise UserError(
            "--data has no image for the test, which holds out two images of each text that has three or more; "
            "add images"
        )
    return LabeledImages(images, labels, tuple(known), train[~torch.isin(train, held)], held, test, novelty)


def classes_of_texts(pairs: Pairs, *, validation: int, seed: int) -> LabeledImages:
    """Make each text a class; the last two images of a text that has three or more are for the test."""
    counts = pairs.first.diff()
    text = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    place = torch.arange(len(text)) - pairs.first[text]
    for_test = (counts[text] > _HELD_OUT) & (place >= counts[text] - _HELD_OUT)
    names = [pairs.texts[i] for i in text.tolist()]
    return with_split(pairs.images, names, for_test, validation=validation, seed=seed)


def images_of_step(data: LabeledImages, *, batch_size: int, step: int, seed: int) -> Tensor:
    """Return the indices of the images of the step's global batch; a pass leaves out its incomplete last batch."""
    passed, position = divmod(step, len(data.train) // batch_size)
    order = torch.randperm(len(data.train), generator=seeded(seed, "order", passed))
    return data.train[order[position * batch_size : (position + 1) * batch_size]]
