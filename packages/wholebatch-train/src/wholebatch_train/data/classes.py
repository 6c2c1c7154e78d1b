"""Images of classes: which are for training, validation and test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError

from .pairs.pairs import Pairs
from .pictures.skip_bad import LeftOut
from .randomness import seeded
from .sides import Chosen, Side

_HELD_OUT, _PART = 2, 10  # images of a text that are held out for the test, if it has more; or a tenth of many
_MOST_TEST = 10_000  # images of the test, unless two of each text are more


@dataclass(frozen=True)
class LabeledImages:
    """Images, the class of each, and their split."""

    pictures: Side
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
    digest: str = ""
    """A hash of the data, equal on ranks that see the same."""
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64, (n,): equal for equal images."""
    left_out: tuple[LeftOut, ...] = ()
    """The rows that `--skip-bad` has left out."""

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    def picture(self, row: Tensor) -> Any:
        """Return the picture of a row."""
        return self.pictures.items(row[None])[0]

    def example(self, label: int) -> Tensor:
        """Return the row of a class's first image in training, ()."""
        return self.train[self.labels[self.train] == label][0]


def with_split(
    pictures: Side,
    names: Sequence[str],
    for_test: Tensor,
    *,
    validation: int,
    seed: int,
    at_most: bool = False,
    once: Tensor | None = None,
    novelty: str = "images never seen",
    digest: str = "",
) -> LabeledImages:
    """Split images whose classes are the names of those that are not `for_test`, a mask of (n,).

    For the validation, `validation` such images are held out: one of each class in a random order, then a second one of
    each, and so on, but at most half of a class's; with `at_most`, fewer if there are not so many. Test images of other
    names are left out.
    `once`, a mask of (n,), says which images the data have once; only these are held out for the validation.
    """
    known = {name: index for index, name in enumerate(sorted({names[i] for i in (~for_test).nonzero()[:, 0].tolist()}))}
    labels = torch.tensor([known.get(name, -1) for name in names])
    train = (~for_test).nonzero()[:, 0]
    count = torch.bincount(labels[train], minlength=len(known))
    alone = train if once is None else train[once[train]]
    of_alone = torch.bincount(labels[alone], minlength=len(known))
    most = torch.minimum(of_alone, count // 2)
    able, total = (most > 0).nonzero()[:, 0], int(most.sum())
    if not total and at_most:
        raise UserError(
            "--data has no image for the validation: expected a text with two images to train on, beside two for the "
            "test; add images"
        )
    if total < validation and not at_most:
        raise UserError(
            f"--validation-texts {validation} needs as many images, at most half of those that a text has to train on; "
            f"got {total}"
        )
    turn = torch.empty(len(known), dtype=torch.int64)
    turn[able[torch.randperm(len(able), generator=seeded(seed, "validation"))]] = torch.arange(len(able))
    order = alone[torch.randperm(len(alone), generator=seeded(seed, "validation images"))]
    by_class = order[labels[order].argsort(stable=True)]  # a class's images at random
    place = torch.arange(len(by_class)) - (of_alone.cumsum(0) - of_alone)[labels[by_class]]
    left = place < most[labels[by_class]]
    by_class, place = by_class[left], place[left]
    held = by_class[(place * len(able) + turn[labels[by_class]]).argsort()[:validation]].sort().values
    test = (for_test & (labels >= 0)).nonzero()[:, 0]
    if not len(test):
        raise UserError(
            "--data has no image for the test, which holds out two images of each text that has three or more, but no "
            "image that the data have twice; add images"
        )
    return LabeledImages(pictures, labels, tuple(known), train[~torch.isin(train, held)], held, test, novelty, digest)


def classes_of_texts(pairs: Pairs, *, validation: int, seed: int, at_most: bool = False) -> LabeledImages:
    """Make each text a class; of three images of a text or more the last two, or the last tenth, are for the test.

    Of large classes fewer are, if all these would be more than 10,000 images: pictures of the test are not trained on.
    An image that the data have twice is never held out.
    """
    counts = pairs.first.diff()
    text = torch.repeat_interleave(torch.arange(len(pairs)), counts)
    place = torch.arange(len(text)) - pairs.first[text]
    held_out = (counts // _PART).clamp(_HELD_OUT, max(_HELD_OUT, _MOST_TEST // max(1, len(pairs))))[text]
    for_test = (counts[text] > _HELD_OUT) & (place >= counts[text] - held_out)
    once = None
    if "image" in pairs.numbers:
        equal = torch.unique(pairs.numbers["image"][pairs.order], return_inverse=True)[1]
        once = torch.bincount(equal)[equal] == 1
        for_test &= once
    pictures, texts = pairs.sides.values()
    of_group = texts.items(pairs.rows(torch.arange(len(pairs))))
    names = [of_group[i] for i in text.tolist()]
    for name in names:
        if re.fullmatch("-[0-9]+", name.strip()):
            raise UserError(
                f"--data has the class {name}: expected names or numbers >= 0; leave out rows without a class"
            )
    chosen, digest = Chosen(pictures, pairs.order), pairs.digest
    labeled = with_split(
        chosen, names, for_test, validation=validation, at_most=at_most, once=once, seed=seed, digest=digest
    )
    numbers = pairs.numbers["image"][pairs.order] if "image" in pairs.numbers else torch.arange(len(names))
    return replace(labeled, left_out=pairs.left_out, numbers=numbers)
