"""A user's picture as eight bits per channel: upright, nothing transparent, scaled to fit a square and padded."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BACKGROUND = 255
"""What shows through transparent pixels: white, as on a page. Their own color in the file is arbitrary."""
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_ORIENTATION = 0x0112  # of EXIF


def read_image(path: Path, *, size: int, channels: int) -> Tensor:
    """The picture as uint8 of shape (channels, size, size); of several frames the first.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: with the reason, if it cannot be read.
    """
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            # Pixels that cannot be decoded are errors. Warnings are about other things, such as a file's metadata.
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                image.load()
                picture = _eight_bits(_upright(image)).convert("L" if channels == 1 else "RGB")
            pixels = torch.from_numpy(np.array(ImageOps.pad(picture, (size, size))))
    except FileNotFoundError:
        raise
    except Exception as error:  # decoders meet damaged files with exceptions of any type
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from error
    return pixels.unsqueeze(0) if channels == 1 else pixels.permute(2, 0, 1).contiguous()


def _upright(image: Any) -> Any:
    """As a viewer shows it: cameras write how they were held beside the pixels."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    try:
        turn = turns.get(image.getexif().get(_ORIENTATION))
    except Exception:  # damaged metadata turn nothing, and the pixels are there
        return image
    return image if turn is None else image.transpose(turn)


def _eight_bits(image: Any) -> Any:
    """In a mode whose channels have eight bits, over the background where it is transparent."""
    from PIL import Image

    if image.mode == "F" or image.mode.startswith("I"):
        return _scaled(image)
    image = image.convert(_PREMULTIPLIED.get(image.mode, image.mode))
    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return image
    page = Image.new("RGBA", image.size, (BACKGROUND,) * 3 + (255,))
    # By way of RGBA: from a palette to gray Pillow takes what lies beneath, and warns.
    return Image.alpha_composite(page, image.convert("RGBA")).convert("RGB")


def _scaled(image: Any) -> Any:
    """One channel of 16 bits, in whichever type they come, or of floats from 0 to 1. Pillow's conversion would clip."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    largest, unit = (1, "floats from 0 to 1") if image.mode == "F" else (65535, "integers from 0 to 65535")
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= largest):
        raise ValueError(
            f"one channel of {values.dtype.name} must hold {unit}, got {low} to {high}; write it with 8 or 16 bits"
        )
    gray = np.rint(values.astype(np.float64) * (255 / largest)).astype(np.uint8)
    if "transparency" in image.info:
        gray[values == image.info["transparency"]] = BACKGROUND
    return Image.fromarray(gray)
