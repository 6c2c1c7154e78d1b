"""The embedded data set: images of Unicode characters and their names, from the fonts that matplotlib ships."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from .classes import LabeledImages, with_split
from .pairs.pairs import Pairs
from .sides import DrawnPictures, Texts
from .tables.columns import digest_of

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
    labeled = with_split(
        DrawnPictures(images),
        names,
        for_test,
        validation=validation,
        seed=seed,
        novelty="faces never seen",
        digest=digest_of(images, "\n".join(names), for_test),
    )
    known: dict[bytes, int] = {}
    numbers = [known.setdefault(pixels.tobytes(), number) for number, pixels in enumerate(images.numpy())]
    return replace(labeled, numbers=torch.tensor(numbers))


def _draw(image_size: int, faces_to_draw: Sequence[str]) -> tuple[Tensor, list[str], list[str]]:
    """Draw every (face, character) with a name and a visible shape: about 47,000 images of 6,700 characters in all.

    Returns:
        The images (n, 1, size, size), the characters' names, and the faces.
    """
    import matplotlib
    import numpy as np
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

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
