"""Pictures as data URIs, small enough for a page with many of them."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

_LARGEST = 160  # pixels of a side: twice the size on the page
_SMALL = 64  # pixels; not larger ones stay exact
_JPEG_QUALITY = 85


def data_uri(picture: Image) -> str:
    """Return a picture as a data URI, scaled to at most 160 pixels: PNG if it is small or transparent, else JPEG."""
    small = picture.copy()
    if small.mode not in ("L", "RGB", "RGBA"):
        small = small.convert("RGBA" if "transparency" in small.info or small.mode in ("PA", "LA") else "RGB")
    small.thumbnail((_LARGEST, _LARGEST))
    file = io.BytesIO()
    exact = small.mode == "RGBA" or max(small.size) <= _SMALL
    if exact:
        small.save(file, "PNG", optimize=True)
    else:
        small.save(file, "JPEG", quality=_JPEG_QUALITY)
    kind = "png" if exact else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def is_coarse(picture: Image) -> bool:
    """Return whether a picture has so few pixels that a browser should not smooth them."""
    return max(picture.size) <= _SMALL
