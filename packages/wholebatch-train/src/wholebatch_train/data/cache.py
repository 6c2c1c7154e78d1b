"""The cache of tables: what is slow to read is written once as an Arrow file, which all ranks of a machine map.

The name of a file holds the path, time and size of its sources, so that a changed source is read again. A file appears
under its name when the disk has all of it. A start validates everything but the bytes of pictures, because a damaged
Arrow file can end the process that reads it; a start takes as long with large pictures as with small ones.

PATHS-FACTS.arrow                a table; PATHS is a hash of the paths of its sources, FACTS of their sizes and times
PATHS-COLUMN-STAMP-KEY.ENDING    a result about the pictures of a column
PATHS.lock, PATHS-COLUMN.lock    locks of the processes that write these
"""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from torch import Tensor

from wholebatch.app import UserError, amount, flock
from wholebatch.app.tensors import TensorFile, write_tensors

from .sides import FilePictures, file_of
from .table import digest_of, is_text

_VERSION = 7  # of the cached files
_MOST_BYTES = 2**30  # of sources whose table is kept in memory where the cache cannot be written
_PARTIAL = ".partial"
_ABANDONED_S = 86400  # without a write
Batches = Callable[[], Iterator[Any]]
"""Yields record batches, one at least."""


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
    paths_hash = hash_of_paths(sources)
    name = f"{paths_hash}-{short_hash(repr((_VERSION, [(x.st_mtime_ns, x.st_size) for x in states])), 16)}"
    try:
        folder = cache_folder()
        whole = folder / f"{name}.arrow"
        if (table := _find(whole)) is not None:  # without the lock, on which ranks would wait for each other
            return table, ()
        before_writing(folder)
        with alone(folder / f"{paths_hash}.lock"):
            if (table := _find(whole)) is not None:
                return table, ()
            with new_file(folder) as file:
                _write_table(file, batches)
                Path(file.name).replace(whole)
            for old in folder.glob(f"{paths_hash}-*.arrow"):  # of earlier versions of the sources
                if old != whole:
                    remove_file(old)
        return mapped(whole), ()
    except OSError as error:
        return _read_into_memory(batches, sum(x.st_size for x in states), error)


def _find(file: Path) -> Any | None:
    """Return the table of a cached file; None if there is none, or a damaged one, which is written again."""
    try:
        return mapped(file)
    except (OSError, ValueError):
        return None


def _read_into_memory(batches: Batches, size: int, error: OSError) -> tuple[Any, tuple[str, ...]]:
    where = "the cache (wholebatch/tables in $XDG_CACHE_HOME, or in ~/.cache)"
    reason = error.strerror or str(error)
    if size > _MOST_BYTES:
        raise UserError(
            f"{where} cannot be written: {reason}; set XDG_CACHE_HOME to a folder with about {amount(size)} of space"
        ) from error
    table = pa.Table.from_batches(list(batches()))
    return table, (f"the table is in the memory of each rank: {where} cannot be written ({reason})",)


def cache_folder() -> Path:
    """Return the folder of tables that have been read: wholebatch/tables in $XDG_CACHE_HOME or ~/.cache; or OSError."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # no home
        raise OSError(None, str(error)) from error
    folder = home / "wholebatch" / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in here with this path; where there are no locks, do not wait."""
    with ExitStack() as held:
        with suppress(OSError):  # a folder that cannot be written, which its writer says
            flock(held.enter_context(path.open("wb")), "LOCK_EX")
        yield


@contextmanager
def new_file(folder: Path) -> Iterator[Any]:
    """Open a new file with a name, which is removed at the end unless it was renamed.

    A process that is killed leaves it; one that writes here a day later removes it.
    """
    for partial in folder.glob(f"*{_PARTIAL}"):
        with suppress(OSError):  # removed by another process
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=_PARTIAL, delete=False) as file:
        try:
            yield file
        finally:
            remove_file(Path(file.name))


def hash_of_paths(sources: Sequence[Path]) -> str:
    """Return the hash of paths with which the names of files about these sources begin."""
    return short_hash(repr([str(path.absolute()) for path in sources]), 24)


def short_hash(text: str, digits: int) -> str:
    """Return the first hexadecimal digits of a hash."""
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:digits]


def remove_file(path: Path) -> None:
    """Remove a file; another process may have removed it, or the folder may be read-only."""
    with suppress(OSError):
        path.unlink()


def _write_table(file: Any, batches: Batches) -> None:
    """Write record batches into an open file with a name, and wait until the disk has them."""
    each = batches()
    first = next(each)
    with pa.ipc.new_file(pa.PythonFile(file, mode="w"), first.schema) as writer:
        writer.write_batch(first)
        for batch in each:
            writer.write_batch(batch)
    file.flush()
    os.fsync(file.fileno())


def mapped(path: Path) -> Any:
    """Return the table of a file, which is mapped; OSError or ValueError for one whose rows cannot all be read."""
    with pa.memory_map(str(path)) as file:
        table = pa.ipc.open_file(file).read_all()
    table.validate(full=True)
    return table


Tensors = Mapping[str, Tensor]


def kept(
    side: FilePictures,
    key: str,
    ending: str,
    find: Callable[[], Tensors],
    not_kept: Callable[[OSError], None] = lambda _: None,
) -> Tensors:
    """Return what `find` has found, now or at an earlier start with the same files."""
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
