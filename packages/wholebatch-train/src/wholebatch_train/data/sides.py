"""One side of the pairs: pictures or texts, by the number of their row, as an encoder's `prepare` takes them."""

from __future__ import annotations

import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from PIL import Image
from torch import Tensor

from wholebatch.app import UserError

from ..config import Kind
from .reading import open_picture
from .table import Table, is_bytes, is_text


class Side(ABC):
    """The pictures or the texts of the rows."""

    kind: Kind

    @abstractmethod
    def items(self, rows: Tensor) -> list[Any]:
        """Return a PIL image, or a text, for each of these rows (n,)."""


class Texts(Side):
    """Texts in memory, or in a column of Arrow."""

    kind: Kind = "text"

    def __init__(self, texts: Sequence[str] | Any) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def items(self, rows: Tensor) -> list[str]:
        texts = [self._texts[row] for row in rows.tolist()]
        return [each if isinstance(each, str) else each.as_py() for each in texts]


class DrawnPictures(Side):
    """Pictures that were drawn in memory, already as the built-in encoder reads them."""

    kind: Kind = "image"

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels
        """uint8, (n, channels, size, size)."""

    def items(self, rows: Tensor) -> list[Image.Image]:
        layers = [x[0] if len(x) == 1 else x.permute(1, 2, 0) for x in self.pixels[rows]]
        return [Image.fromarray(x.contiguous().numpy()) for x in layers]


class FilePictures(Side):
    """Pictures in files, in tar shards or in a column of bytes; each is read when a batch needs it."""

    kind: Kind = "image"

    def __init__(self, table: Table, column: str) -> None:
        self.table, self.column = table, column
        self._places = table.arrow[column]
        kind = self._places.type
        if not (is_text(kind) or is_bytes(kind) or pa.types.is_struct(kind)):
            raise UserError(
                f"{table.source}: the column {column!r} must hold paths or bytes of pictures to be the image; "
                f"got {kind}"
            )

    def place(self, row: int) -> Any:
        """Return where a picture lies: a path, its bytes, or (file, offset, size)."""
        value = self._places[row].as_py()
        if isinstance(value, dict):
            if "shard" in value:
                return value["shard"], value["offset"], value["size"]
            value = value.get("bytes") or value.get("path")  # as datasets stores images
        if not value or (isinstance(value, str) and not value.strip()):
            raise UserError(f"{self.table.where(row)}: {self.table.why_empty(row, 'image', self.column)}")
        if isinstance(value, str) and "\0" in value:
            raise UserError(f"{self.table.where(row)}: a path cannot hold the character of code 0, got {value!r}")
        return Path(file_of(str(self.table.folder), value)) if isinstance(value, str) else value

    def items(self, rows: Tensor) -> list[Image.Image]:
        try:
            return [self.read(row) for row in rows.tolist()]
        except UserError as error:
            raise UserError(f"{error}; --skip-bad leaves such rows out") from error

    def read(self, row: int) -> Image.Image:
        """Return the picture of a row."""
        place = self.place(row)
        try:
            return open_picture(place)
        except FileNotFoundError as error:
            if isinstance(place, tuple):
                raise UserError(f"{self.table.where(row)}: there is no shard {place[0]!r} any more") from error
            raise self.missing(row) from error
        except ValueError as error:
            name = self._quoted_path(row) or "the picture"
            raise UserError(f"{self.table.where(row)}: {name} cannot be read as an image ({error})") from error

    @cached_property
    def _lengths(self) -> Any:
        """The bytes of each picture in the table or in a shard, as a column; those of files are null. None: all are."""
        column, kind = self._places, self._places.type
        if pa.types.is_struct(kind):
            if kind.get_field_index("shard") >= 0:
                return pc.struct_field(column, "size")
            if kind.get_field_index("bytes") < 0:
                return None
            column = pc.struct_field(column, "bytes")
        return pc.binary_length(column) if is_bytes(column.type) else None

    def size(self, row: int) -> int:
        """Return the bytes of the file of a row's picture, which is not read."""
        if self._lengths is not None and (length := self._lengths[row].as_py()):
            return int(length)
        try:
            return Path(self.place(row)).stat().st_size
        except UserError as error:
            raise UserError(f"{error}; --skip-bad leaves such rows out") from error
        except FileNotFoundError as error:
            raise UserError(f"{self.missing(row)}; --skip-bad leaves such rows out") from error
        except OSError as error:
            raise self.refused(row, error) from error

    def missing(self, row: int) -> UserError:
        """Return the error about a row whose file is not there."""
        return UserError(f"{self.table.where(row)}: there is no image {self._quoted_path(row)}".rstrip())

    def refused(self, row: int, error: OSError) -> UserError:
        """Return the error about a row whose file the system refuses to read."""
        reason = ": ".join(filter(None, (self._quoted_path(row), error.strerror or str(error))))
        return UserError(f"{self.table.where(row)}: {reason}; --skip-bad leaves such rows out")

    def _quoted_path(self, row: int) -> str:
        place = self.place(row)
        if not isinstance(place, Path) or str(place).endswith(self.table.where(row)):
            return ""
        return repr(str(place))


class Chosen(Side):
    """Some rows of another side, with new numbers."""

    def __init__(self, side: Side, rows: Tensor) -> None:
        self.kind, self.side, self.rows = side.kind, side, rows

    def items(self, rows: Tensor) -> list[Any]:
        return self.side.items(self.rows[rows])


def file_of(folder: str, name: str) -> str:
    """Return the path of a picture; the disk may have another form of Unicode in it, or the table that of Windows."""
    path = os.path.join(folder, name)
    if (name.isascii() and "\\" not in name) or os.path.exists(path):
        return path
    forms = [unicodedata.normalize(form, each) for each in (name, name.replace("\\", "/")) for form in ("NFC", "NFD")]
    return next(filter(os.path.exists, (os.path.join(folder, each) for each in forms)), path)
