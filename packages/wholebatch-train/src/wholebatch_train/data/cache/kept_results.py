"""Results about a table's pictures, kept in the cache until one of the pictures' files changes.

One process of a machine computes a result, while the others wait. The next result for changed pictures replaces it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app.tensors import TensorFile, write_tensors

from ..pictures.equal import MOST, Numbered, numbers_of_pictures
from ..sides import FilePictures, file_of
from ..tables.columns import digest_of, is_text
from .tables import alone, cache_folder, hash_of_paths, remove_file, short_hash

Tensors = Mapping[str, Tensor]


def kept(
    side: FilePictures,
    key: str,
    ending: str,
    find: Callable[[], Tensors],
    not_kept: Callable[[OSError], None] = lambda _: None,
) -> Tensors:
    """Return what `find` has found, now or at an earlier start with the same files.

    Args:
        side: the pictures.
        key: what else the result depends on.
        ending: of the result's file, such as ".unreadable".
        find: computes the result, which a file keeps with digests.
        not_kept: called with the error where the cache cannot be written.
    """
    try:
        folder = cache_folder()
    except OSError as error:
        not_kept(error)
        return find()
    name = f"{hash_of_paths(side.table.files or (side.table.source,))}-{short_hash(side.column, 12)}"
    current = f"{name}-{stamp_of_pictures(side)[:24]}-"
    file = folder / f"{current}{short_hash(key, 12)}{ending}"
    if (result := _read(file)) is not None:
        return result
    with alone(folder / f"{name}.lock"):
        if (result := _read(file)) is not None:
            return result
        result = find()
        try:
            write_tensors(file, result, {})
        except OSError as error:
            not_kept(error)
        for old in folder.glob(f"{name}-*"):
            if not old.name.startswith(current):
                remove_file(old)
    return result


def _read(file: Path) -> Tensors | None:
    try:
        with TensorFile(file) as content:
            return {name: content.read(name) for name in content.entries}
    except (OSError, ValueError):  # there is none, or a damaged one
        return None


def text_tensor(text: str) -> Tensor:
    """Return a text as a tensor of its bytes; `text_of` is the inverse."""
    return torch.tensor([*text.encode()], dtype=torch.uint8)


def text_of(tensor: Tensor) -> str:
    """Return the text of a tensor."""
    return bytes(tensor.tolist()).decode()


def kept_numbers(side: FilePictures, rows: Tensor) -> Numbered:
    """Return `numbers_of_pictures`, of now or of an earlier start with the same files."""
    column = side.table.arrow[side.column]
    if is_text(column.type) and len(column.unique()) > MOST:  # not even the files' sizes are looked at
        return numbers_of_pictures(side, rows)

    def find() -> Tensors:
        numbers, sizes, said = numbers_of_pictures(side, rows)
        return {"numbers": numbers, "sizes": sizes, "said": text_tensor(said)}

    result = kept(side, digest_of(rows), ".pictures", find)
    return Numbered(result["numbers"], result["sizes"], text_of(result["said"]))


def stamp_of_pictures(side: FilePictures) -> str:
    """Return a hash of the paths, the sizes and the times of the last change of all files that hold these pictures."""
    column, table = side.table.arrow[side.column], side.table
    hasher = hashlib.sha256()
    if not is_text(column.type):  # the pictures lie inside of the files that the rows come from
        hasher.update(side.column.encode())
        _add_files(hasher, (str(file.absolute()) for file in table.files))
    paths = _paths(column)
    if paths is not None:
        hasher.update(digest_of(paths).encode())
        folder = str(table.folder.absolute())
        _add_files(hasher, (file_of(folder, path) for path in paths.unique().to_pylist() if path))
    return hasher.hexdigest()


def _add_files(hasher: Any, files: Iterable[str]) -> None:
    for file in files:
        try:
            status = os.stat(file)
            facts = status.st_size, status.st_mtime_ns
        except (OSError, ValueError):  # the row is an error when it is read
            facts = 0, 0
        hasher.update(f"{file} {facts}".encode(errors="surrogateescape"))


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
