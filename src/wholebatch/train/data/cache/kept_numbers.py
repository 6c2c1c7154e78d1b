"""Which pictures are equal, and their sizes, as the cache keeps them: at a later start no picture is read for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..pictures.equal import MOST, Numbered, numbers_of_pictures
from ..sides import FilePictures
from ..tables.fingerprint import digest_of
from ..tables.plain_types import is_text
from ..tables.table import need_pyarrow
from .kept import kept

_SAID = b"wholebatch said"


def kept_numbers(side: FilePictures, rows: Tensor) -> Numbered:
    """Return `numbers_of_pictures`, of now or of an earlier start with the same files.

    Raises:
        UserError: one of these rows has no picture, or the path of none.
    """
    column = side.table.arrow[side.column]
    if is_text(column.type) and len(column.unique()) > MOST:  # not even the files' sizes are looked at
        return numbers_of_pictures(side, rows)

    def read(file: Path) -> Numbered | None:
        return _read(file, len(column))

    return kept(
        side, digest_of(rows), ".pictures", read=read, find=lambda: numbers_of_pictures(side, rows), write=_write
    )  # fmt: skip


def _write(file: Any, found: Numbered) -> None:
    pa = need_pyarrow()
    table = pa.table({"numbers": found.numbers.numpy(), "sizes": found.sizes.numpy()})
    table = table.replace_schema_metadata({_SAID: found.said.encode()})
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), table.schema) as writer:
        writer.write_table(table)


def _read(file: Path, count: int) -> Numbered | None:
    pa = need_pyarrow()
    try:
        with pa.OSFile(str(file), "rb") as content:
            table = pa.ipc.open_file(content).read_all()
        numbers, sizes = (torch.from_numpy(table[name].to_numpy().copy()) for name in ("numbers", "sizes"))
        said = table.schema.metadata[_SAID].decode()
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):  # there is none, or a damaged one
        return None
    is_whole = len(numbers) == count and numbers.dtype == sizes.dtype == torch.int64
    return Numbered(numbers, sizes, said) if is_whole else None
