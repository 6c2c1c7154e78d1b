"""A hash of a table's pictures by the files that hold them, which takes no longer with large pictures."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

from ..sides import FilePictures, file_of
from ..tables.fingerprint import digest_of
from ..tables.plain_types import is_text


def stamp_of_pictures(side: FilePictures) -> str:
    """Return a hash of the paths, the sizes and the times of the last change of all files that hold these pictures."""
    column, table = side.table.arrow[side.column], side.table
    found = hashlib.sha256()
    if not is_text(column.type):  # the pictures lie inside of the files that the rows come from
        found.update(side.column.encode())
        _add_files(found, (str(file.absolute()) for file in table.files))
    paths = _paths(column)
    if paths is not None:
        found.update(digest_of(paths).encode())
        folder = str(table.folder.absolute())
        _add_files(found, (file_of(folder, path) for path in paths.unique().to_pylist() if path))
    return found.hexdigest()


def _add_files(found: Any, files: Iterable[str]) -> None:
    for file in files:
        try:
            status = os.stat(file)
            facts = status.st_size, status.st_mtime_ns
        except (OSError, ValueError):  # the row is an error when it is read
            facts = 0, 0
        found.update(f"{file} {facts}".encode(errors="surrogateescape"))


def _paths(column: Any) -> Any:
    """Return the texts of a column that are paths of pictures, with null for a row with the bytes; None: none are."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    if is_text(kind):
        return column
    if not pa.types.is_struct(kind) or kind.get_field_index("path") < 0:
        return None
    paths = pc.struct_field(column, "path")
    if kind.get_field_index("bytes") < 0 or not is_text(paths.type):
        return paths if is_text(paths.type) else None
    content = pc.struct_field(column, "bytes")
    if pa.types.is_null(content.type):
        return paths
    return pc.if_else(pc.fill_null(pc.greater(pc.binary_length(content), 0), False), None, paths)
