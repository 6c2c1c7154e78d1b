"""Reading a user's picture: upright, opaque, eight bits per channel."""

from __future__ import annotations

import io
import logging
import os
import stat
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "AVIF", "ICO", "TGA")
"""Formats of pixels, by Pillow's names, whatever a file is called: of others, one starts a program (EPS)."""

logging.getLogger("PIL").addHandler(logging.NullHandler())  # else Python prints what Pillow logs of a damaged file

BACKGROUND = 255
"""The color behind transparent pixels: white, as on a page. Their color in the file is arbitrary."""
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}


def open_picture(place: Path | bytes | tuple[str, int, int]) -> Any:
    """Read the first frame of a picture as a PIL image of mode L or RGB: upright, opaque, eight bits per channel.

    ValueError has the reason why it cannot be read; FileNotFoundError: there is no such file.
    """
    Image.init()  # this Pillow may not have all formats
    formats = [name for name in FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings():
            # Pixels that cannot be decoded are errors; warnings concern a file's metadata and the like.
            warnings.simplefilter("ignore")
            source = _open_regular(place) if isinstance(place, Path) else io.BytesIO(bytes_of(place))
            with source, Image.open(source, formats=formats) as image:
                if max(image.size) > 65_535:  # as many as a JPEG can have
                    raise ValueError(f"{image.width:,} x {image.height:,} pixels; expected sides of at most 65,535")
                image.load()
                with suppress(Exception):  # damaged metadata: the pixels are used as they are
                    ImageOps.exif_transpose(image, in_place=True)  # EXIF records how the camera was held
                picture = _to_eight_bits(image)
        return picture if picture.mode in ("L", "RGB") else picture.convert("RGB")
    except FileNotFoundError:
        raise
    except UnidentifiedImageError as error:  # whose words are the path, which the caller names, or that of an object
        raise ValueError("it is no picture of a known format, such as PNG or JPEG") from error
    except Exception as error:  # decoders raise exceptions of any type for damaged files
        reason = error.strerror if isinstance(error, OSError) else None  # without the path
        raise ValueError(reason or " ".join(str(error).split()) or type(error).__name__) from error


def bytes_of(place: Path | bytes | tuple[str, int, int]) -> bytes:
    """Return the bytes of a picture's file; OSError or ValueError if it cannot be read."""
    if isinstance(place, bytes):
        return place
    if isinstance(place, Path):
        with _open_regular(place) as file:
            return file.read()
    path, offset, size = place
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _open_without_waiting(name: str, flags: int) -> int:
    return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))


def _open_regular(path: Path) -> BinaryIO:
    """Open a file, or the file that a link leads to; opening a pipe would wait for a writer."""
    file = open(path, "rb", opener=_open_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ValueError("it is no regular file")
    return file


def _to_eight_bits(image: Any) -> Any:
    """Convert to a mode with eight bits per channel, with the background behind transparent pixels."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _scale(image)
    image = image.convert(_PREMULTIPLIED.get(image.mode, image.mode))
    if image.mode not in ("LA", "PA", "RGBA") and "transparency" not in image.info:
        return image
    page = Image.new("RGBA", image.size, (BACKGROUND,) * 3 + (255,))
    # Through RGBA: a direct conversion from a palette to gray ignores the transparency, and warns.
    return Image.alpha_composite(page, image.convert("RGBA")).convert("RGB")


def _scale(image: Any) -> Any:
    """Scale one channel of 16 bits, of any type, or of floats from 0 to 1, to eight bits. Pillow would clip it."""
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
