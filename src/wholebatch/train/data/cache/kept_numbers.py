"""Which pictures are equal, and their sizes, as the cache keeps them: at a later start no picture is read for it."""

from __future__ import annotations

from torch import Tensor

from ..pictures.equal import MOST, Numbered, numbers_of_pictures
from ..sides import FilePictures
from ..tables.fingerprint import digest_of
from ..tables.plain_types import is_text
from .kept import Tensors, kept, text_of, text_tensor


def kept_numbers(side: FilePictures, rows: Tensor) -> Numbered:
    """Return `numbers_of_pictures`, of now or of an earlier start with the same files.

    Raises:
        UserError: one of these rows has no picture, or the path of none.
    """
    column = side.table.arrow[side.column]
    if is_text(column.type) and len(column.unique()) > MOST:  # not even the files' sizes are looked at
        return numbers_of_pictures(side, rows)

    def pack(found: Numbered) -> Tensors:
        return {"numbers": found.numbers, "sizes": found.sizes, "said": text_tensor(found.said)}

    def unpack(tensors: Tensors) -> Numbered:
        return Numbered(tensors["numbers"], tensors["sizes"], text_of(tensors["said"]))

    return kept(
        side, digest_of(rows), ".pictures", find=lambda: numbers_of_pictures(side, rows), pack=pack, unpack=unpack
    )
