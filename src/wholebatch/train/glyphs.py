"""The embedded data set: images of Unicode characters and their names, from the fonts that matplotlib ships."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import torch

from .pairs import Pairs

# The upright sans face first: it has the most characters, and the first image of a character is the one it is
# tested with. (LastResort, also shipped, draws 135,962 boxes that stand for no character.)
FACES = (
    "DejaVuSans", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Bold", "DejaVuSerif-Bold", "DejaVuSansMono-Bold",
    "DejaVuSans-Oblique", "DejaVuSerif-Italic", "DejaVuSansMono-Oblique", "DejaVuSans-BoldOblique",
    "DejaVuSerif-BoldItalic", "DejaVuSansMono-BoldOblique",
)  # fmt: skip


def glyph_pairs(image_size: int) -> Pairs:
    """Every (face, character) with a name and a visible shape: about 47,000 images of 6,700 characters."""
    import matplotlib
    import numpy as np
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    images, names = [], []
    for face in FACES:
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
    return Pairs.grouped_by_text(torch.from_numpy(np.stack(images)).unsqueeze(1), names)
