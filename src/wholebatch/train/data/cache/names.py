"""The names of the cache's files, and the removal of those that no table needs any more.

PATHS-FACTS-CHECKSUM.arrow       a table; PATHS is a hash of the paths of its sources, FACTS of their sizes and times
PATHS-COLUMN-STAMP-KEY.ENDING    a result about the pictures of a column, which goes with the table
uncached-PATHS-...               the same of a table that the cache does not hold, such as a folder's
PATHS.lock, PATHS-COLUMN.lock    locks of the processes that write these
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_DIGITS = 24
_OF_TABLE = re.compile(rf"([0-9a-f]{{{_DIGITS}}})[-.]")


def hash_of_paths(sources: Sequence[Path]) -> str:
    """Return the hash of paths with which the names of files about these sources begin."""
    return short_hash(repr([str(path.absolute()) for path in sources]), _DIGITS)


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def name_beside_table(folder: Path, sources: Sequence[Path]) -> str:
    """Return how the names of results about a table begin."""
    of_paths = hash_of_paths(sources)
    return of_paths if any(folder.glob(f"{of_paths}-*.arrow")) else f"uncached-{of_paths}"


def remove_without_table(folder: Path) -> None:
    """Remove the files that belong to tables which the cache holds no longer. The empty files of locks stay."""
    names = [path.name for path in folder.iterdir()]
    tables = {name[:_DIGITS] for name in names if name.endswith(".arrow")}
    for name in names:
        found = _OF_TABLE.match(name)
        if found and found[1] not in tables and not name.endswith(".lock"):
            remove_file(folder / name)


def remove_file(path: Path) -> None:
    """Remove a file; another process may have removed it, or the folder may be read-only."""
    with suppress(OSError):
        path.unlink()
