"""`--data PATH` as a table: a file of rows, a folder of pictures, tar shards, or a data set that `datasets` has saved.

Whatever is not an Arrow or parquet file is read once and written as an Arrow file into a cache folder, by the first
rank of a machine; a changed source is read anew. No picture is read here.
"""

from __future__ import annotations

import csv
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..._user_error import UserError
from .folders import folder_batches, folder_facts, is_saved_dataset
from .paths import check_path, expand_shards
from .shards import shard_batches
from .table import Table, need_pyarrow
from .text_files import read_json_lines, read_separated

_VERSION = 1  # of the cached files


def open_table(data: str) -> Table:
    """Return the table of `--data`; its first use on a machine writes the cache file.

    Raises:
        UserError: nothing there, nothing in it, or a row that cannot be read, with its file and line.
    """
    check_path(data)
    path = Path(data)
    try:
        found = _open(data, path)
    except OSError as error:
        raise UserError(f"--data: {data!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except csv.Error as error:
        raise UserError(f"{path} is not a {path.suffix[1:].upper()} file: {error}") from error
    if not len(found):
        raise UserError(f"{path} holds no rows")
    return found


def _open(data: str, path: Path) -> Table:
    if path.is_dir() and is_saved_dataset(path):
        return _saved_dataset(path)
    if path.suffix == ".parquet" and path.is_file():
        return _parquet(path)
    if path.suffix in (".csv", ".tsv") and path.is_file():
        return Table(path, _cached([path], lambda: read_separated(path)), path.parent)
    if path.suffix == ".jsonl" and path.is_file():
        return Table(path, _cached([path], lambda: read_json_lines(path)), path.parent)
    shards = expand_shards(data)
    if shards:
        table = _cached(shards, lambda: shard_batches(shards))
        return Table(path, table, path.parent, said=(f"{len(shards)} tar shards",))
    facts = folder_facts(path)
    # The files are listed at every start: a folder does not know when a picture deep in it has changed.
    arrow = _written(lambda: folder_batches(path, facts))
    return replace(Table(path, arrow, path), said=(facts.said,))


def _parquet(path: Path) -> Table:
    need_pyarrow()
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        arrow = pq.read_table(path, memory_map=True)
    except ArrowInvalid as error:
        raise UserError(f"{path} cannot be read as a parquet file: {' '.join(str(error).split())}") from error
    return Table(path, _with_class_names(arrow), path.parent)


def _with_class_names(arrow: Any) -> Any:
    """Replace the numbers of classes by their names, where `datasets` has left the names in the file's metadata."""
    import json

    import pyarrow.compute as pc

    pa = need_pyarrow()
    try:
        features = json.loads((arrow.schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return arrow
    for name, feature in features.items():
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        if isinstance(names, list) and name in arrow.column_names:
            texts = pc.take(pa.array(names, pa.string()), arrow[name])
            arrow = arrow.set_column(arrow.column_names.index(name), name, texts)
    return arrow


def _saved_dataset(path: Path) -> Table:
    try:
        import datasets
    except ImportError as error:
        raise UserError(
            f"--data: {str(path)!r} was saved by the library datasets, which cannot be imported ({error}); "
            "pip install datasets"
        ) from error
    try:
        found = datasets.load_from_disk(str(path))
    except Exception as error:  # of many types, for damaged folders
        raise UserError(f"--data: {str(path)!r} cannot be loaded as a saved data set: {error}") from error
    said: tuple[str, ...] = ()
    if isinstance(found, datasets.DatasetDict):
        if "train" not in found:
            raise UserError(
                f"--data: {str(path)!r} holds the data sets {', '.join(found)}; name one: "
                f"{str(path / next(iter(found)))!r}"
            )
        said = (f"of the data sets {', '.join(found)}, train",)
        found = found["train"]
    found = found.flatten_indices() if found._indices is not None else found
    arrow = found.data.table
    arrow = arrow.replace_schema_metadata({b"huggingface": _features_of(found)})
    return Table(path, _with_class_names(arrow), path, said=said)


def _features_of(dataset: Any) -> bytes:
    import json

    return json.dumps({"info": {"features": dataset.features.to_dict()}}).encode()


def _cached(sources: list[Path], batches: Callable[[], Iterator[Any]]) -> Any:
    """Return the Arrow table of the record batches, from the cache if the sources have not changed since."""
    pa = need_pyarrow()
    facts = [(str(path.absolute()), path.stat().st_mtime_ns, path.stat().st_size) for path in sources]
    name = hashlib.sha256(repr((_VERSION, facts)).encode()).hexdigest()[:32]
    file = cache_folder() / f"{name}.arrow"
    if file.exists():
        try:
            return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
        except pa.ArrowInvalid:  # of a machine that lost power; it is written again
            pass
    return _written(batches, file)


def _written(batches: Callable[[], Iterator[Any]], file: Path | None = None) -> Any:
    """Write the record batches into an Arrow file, and return it mapped into memory; without a name it has no file."""
    pa = need_pyarrow()
    folder = cache_folder()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as sink:
        partial = Path(sink.name)
        try:
            each = batches()
            first = next(each)
            with pa.ipc.new_file(sink, first.schema) as writer:
                writer.write_batch(first)
                for batch in each:
                    writer.write_batch(batch)
            sink.flush()
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    if file is not None:
        partial.replace(file)
        return pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    try:
        return pa.ipc.open_file(pa.memory_map(str(partial))).read_all()  # the mapping outlives the file's name
    finally:
        partial.unlink()


def cache_folder() -> Path:
    """Return the folder of tables that have been read: wholebatch/tables in $XDG_CACHE_HOME or ~/.cache."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wholebatch" / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
