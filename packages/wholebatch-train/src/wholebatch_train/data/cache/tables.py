"""The cache of tables: what is slow to read is written once as an Arrow file, which all ranks of a machine map.

The name of a file holds the path, time and size of its sources, so that a changed source is read again, and a checksum
of its own content but for the bytes of pictures: a file that a full disk or a loss of power has cut short is written
again, and a start takes as long with large pictures as with small ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wholebatch.app import UserError, amount

from ..tables.table import need_pyarrow
from .files import alone, cache_folder, hash_of_paths, new_file, remove_file, short_hash
from .table_file import Batches, checksum_of, mapped, write_table

_VERSION = 6  # of the cached files
_MOST_BYTES = 2**30  # of sources whose table is kept in memory where the cache cannot be written


def cached(
    sources: list[Path], batches: Batches, before_writing: Callable[[Path], None] = lambda _: None
) -> tuple[Any, tuple[str, ...]]:
    """Return the Arrow table of the record batches, and lines about it; from the cache if no source has changed.

    Of several processes that start at the same time, one reads the sources and the others wait.

    Args:
        sources: the files that the batches are read from.
        batches: yields them, one at least. Of a source that cannot be read it raises no OSError: that is the cache's.
        before_writing: called with the folder of the cache if the sources are to be read, before they are.
    """
    states = [path.stat() for path in sources]
    of_paths = hash_of_paths(sources)
    name = f"{of_paths}-{short_hash(repr((_VERSION, [(x.st_mtime_ns, x.st_size) for x in states])), 16)}"
    try:
        folder = cache_folder()
        if (table := _find(folder, name)) is not None:  # without the lock, on which ranks would wait for each other
            return table, ()
        before_writing(folder)
        with alone(folder / f"{of_paths}.lock"):
            if (table := _find(folder, name)) is not None:
                return table, ()
            with new_file(folder) as file:
                write_table(file, batches)
                file.flush()
                os.fsync(file.fileno())
                partial = Path(file.name)
                whole = partial.replace(folder / f"{name}-{checksum_of(partial)}.arrow")
            for old in folder.glob(f"{of_paths}-*.arrow"):  # of earlier versions of the sources, or damaged
                if old != whole:  # without locks another process may have written it as well
                    remove_file(old)
        return mapped(whole), ()
    except OSError as error:
        return _read_into_memory(batches, sum(x.st_size for x in states), error)


def _find(folder: Path, name: str) -> Any | None:
    """Return the table of a cached file whose checksum is that of its name; None if there is none."""
    for file in folder.glob(f"{name}-*.arrow"):
        try:
            if checksum_of(file) == file.stem.rpartition("-")[2]:
                return mapped(file)
        except (OSError, ValueError):  # removed by another process, or damaged: it is written again
            continue
    return None


def _read_into_memory(batches: Batches, size: int, error: OSError) -> tuple[Any, tuple[str, ...]]:
    where = "the cache (wholebatch/tables in $XDG_CACHE_HOME, or in ~/.cache)"
    reason = error.strerror or str(error)
    if size > _MOST_BYTES:
        raise UserError(
            f"{where} cannot be written: {reason}; set XDG_CACHE_HOME to a folder with about {amount(size)} of space"
        ) from error
    table = need_pyarrow().Table.from_batches(list(batches()))
    return table, (f"the table is in the memory of each rank: {where} cannot be written ({reason})",)
