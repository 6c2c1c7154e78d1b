"""Images of classes and their split; and the embedded data set: images of Unicode characters and their names.

The characters are drawn by the fonts that matplotlib ships.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from wholebatch.app import UserError

from .pairs import Pairs
from .pictures import LeftOut
from .randomness import seeded
from .sides import Chosen, DrawnPictures, Side, Texts
from .table import digest_of

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
        return len(self.names)

    @property
    def summary(self) -> str:
        """The numbers of the data, in words."""
        return f"{len(self.train) + len(self.validation) + len(self.test)} images of {len(self)} classes"

    def picture(self, row: Tensor) -> Any:
        return self.pictures.items(row[None])[0]

    def example(self, label: int) -> Tensor:
        """Return the row of a class's first image in training, ()."""
        return self.train[self.labels[self.train] == label][0]


def with_split(
    pictures: Side, names: Sequence[str], for_test: Tensor, *, validation: int, seed: int, at_most: bool = False,
    once: Tensor | None = None, **facts: Any,
) -> LabeledImages:  # fmt: skip
    """Split images whose classes are the names of those that are not `for_test`, a mask of (n,).

    For the validation, `validation` such images are held out: one of each class in a random order, then a second one of
    each, and so on, but at most half of a class's; with `at_most`, fewer if there are not so many. Test images of other
    names are left out.
    `once`, a mask of (n,), says which images the data have once; only these are held out for the validation. The
    `facts` are further fields of the result.
    """
    known = {name: index for index, name in enumerate(sorted({names[i] for i in (~for_test).nonzero()[:, 0].tolist()}))}
    labels = torch.tensor([known.get(name, -1) for name in names])
    train = (~for_test).nonzero()[:, 0]
    count = torch.bincount(labels[train], minlength=len(known))
    alone = train if once is None else train[once[train]]
    alone_counts = torch.bincount(labels[alone], minlength=len(known))
    most = torch.minimum(alone_counts, count // 2)
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
    place = torch.arange(len(by_class)) - (alone_counts.cumsum(0) - alone_counts)[labels[by_class]]
    left = place < most[labels[by_class]]
    by_class, place = by_class[left], place[left]
    held = by_class[(place * len(able) + turn[labels[by_class]]).argsort()[:validation]].sort().values
    test = (for_test & (labels >= 0)).nonzero()[:, 0]
    if not len(test):
        raise UserError(
            "--data has no image for the test, which holds out two images of each text that has three or more, but no "
            "image that the data have twice; add images"
        )
    return LabeledImages(pictures, labels, tuple(known), train[~torch.isin(train, held)], held, test, **facts)


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
    numbers, once = torch.arange(len(text)), None
    if "image" in pairs.numbers:
        numbers = pairs.numbers["image"][pairs.order]
        equal = torch.unique(numbers, return_inverse=True)[1]
        once = torch.bincount(equal)[equal] == 1
        for_test &= once
    pictures, texts = pairs.sides.values()
    group_texts = texts.items(pairs.rows(torch.arange(len(pairs))))
    names = [group_texts[i] for i in text.tolist()]
    for name in names:
        if re.fullmatch("-[0-9]+", name.strip()):
            raise UserError(
                f"--data has the class {name}: expected names or numbers >= 0; leave out rows without a class"
            )
    return with_split(
        Chosen(pictures, pairs.order), names, for_test, validation=validation, at_most=at_most, once=once, seed=seed,
        digest=pairs.digest, left_out=pairs.left_out, numbers=numbers,
    )  # fmt: skip


# The upright sans face first: it has the most characters, and the first image of a character is its test image.
# (LastResort, also shipped, draws 135,962 boxes that stand for no character.)
FACES = (
    "DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold",
    "DejaVuSans-Oblique", "DejaVuSerif-Italic", "DejaVuSansMono-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSerif-BoldItalic", "DejaVuSansMono-BoldOblique",
)  # fmt: skip


# Without these two, which are held out for the test, the other ten have 6,494 characters and every kind of face.
TEST_FACES = ("DejaVuSerif-Bold", "DejaVuSans-Oblique")


def glyph_pairs(image_size: int, faces: Sequence[str] = FACES) -> Pairs:
    """Draw characters, paired with their names; a test asks for the first picture of each alone."""
    images, names, _ = _draw(image_size, faces)
    distinct = {name: number for number, name in enumerate(dict.fromkeys(names))}
    group = torch.tensor([distinct[name] for name in names])
    sides = {"image": DrawnPictures(images), "text": Texts(names)}
    pairs = Pairs.grouped(sides, group, digest=digest_of(images, "\n".join(names)), numbers={"text": group})
    return replace(pairs, tested=pairs.rows(torch.arange(len(pairs))))


def glyph_classes(image_size: int, *, validation: int, seed: int) -> LabeledImages:
    """Draw characters, each a class, and hold out two faces for the test."""
    images, names, faces = _draw(image_size, FACES)
    for_test = torch.tensor([face in TEST_FACES for face in faces])
    known: dict[bytes, int] = {}
    numbers = [known.setdefault(pixels.tobytes(), number) for number, pixels in enumerate(images.numpy())]
    return with_split(
        DrawnPictures(images), names, for_test, validation=validation, seed=seed, novelty="faces never seen",
        digest=digest_of(images, "\n".join(names), for_test), numbers=torch.tensor(numbers),
    )  # fmt: skip


def _draw(image_size: int, faces_to_draw: Sequence[str]) -> tuple[Tensor, list[str], list[str]]:
    """Draw each (face, character) with a name and a shape, 47,000: images (n, 1, size, size), names and faces."""
    import matplotlib
    from matplotlib.ft2font import FT2Font

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images, names, faces = [], [], []
    for face in faces_to_draw:
        path = str(folder / f"{face}.ttf")
        # The em is a little smaller than the picture; BASIC layout: no shaping library, same pixels everywhere.
        font = ImageFont.truetype(path, round(0.72 * image_size), layout_engine=ImageFont.Layout.BASIC)
        for code in sorted(FT2Font(path).get_charmap()):
            name = unicodedata.name(chr(code), "")
            if not name:
                continue
            image = Image.new("L", (image_size, image_size))
            ImageDraw.Draw(image).text((image_size / 2, image_size / 2), chr(code), fill=255, font=font, anchor="mm")
            pixels = np.asarray(image)
            if pixels.any():
                images.append(pixels)
                names.append(name)
                faces.append(face)
    return torch.from_numpy(np.stack(images)).unsqueeze(1), names, faces
