"""Results about a table's pictures, kept in the cache until one of the pictures' files changes.

One process of a machine computes a result, while the others wait. A result is removed with its table, or when one of
the pictures has changed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ...._base.files import replacing
from ..sides import FilePictures
from .files import alone, cache_folder
from .names import name_beside_table, remove_file, remove_without_table, short_hash
from .picture_stamps import stamp_of_pictures

_R = TypeVar("_R")


def kept(
    side: FilePictures,
    key: str,
    ending: str,
    *,
    read: Callable[[Path], _R | None],
    find: Callable[[], _R],
    write: Callable[[Any, _R], None],
    not_kept: Callable[[OSError], None] = lambda _: None,
) -> _R:
    """Return what `find` has found, now or at an earlier start with the same files.

    Args:
        side: the pictures.
        key: what else the result depends on.
        ending: of the result's file, such as ".unreadable.json".
        read: reads a result from a file; None if there is none, or a damaged one.
        find: computes it.
        write: writes it into an open file.
        not_kept: called with the error where the cache cannot be written.
    """
    try:
        folder = cache_folder()
        name = f"{name_beside_table(folder, side.table.files or (side.table.source,))}-{short_hash(side.column, 12)}"
    except OSError as error:
        not_kept(error)
        return find()
    current = f"{name}-{stamp_of_pictures(side)[:24]}-"
    file = folder / f"{current}{short_hash(key, 12)}{ending}"
    if (found := read(file)) is not None:
        return found
    with alone(folder / f"{name}.lock"):
        if (found := read(file)) is not None:
            return found
        found = find()
        try:
            with replacing(file) as content:
                write(content, found)
        except OSError as error:
            not_kept(error)
        for old in folder.glob(f"{name}-*"):
            if not old.name.startswith(current):
                remove_file(old)
        remove_without_table(folder)
    return found
