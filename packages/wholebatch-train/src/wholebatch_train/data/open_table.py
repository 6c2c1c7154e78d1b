"""`--data PATH` as a table: a file of rows, a folder of pictures, tar shards, or a data set that `datasets` has saved.

No picture is read here, but for those inside of parquet files. To read one of them from its place, a whole row group
would have to be decompressed, so their first use on a machine copies them into the cache, where each can be read alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wholebatch.app import UserError, amount

from .cache import Batches, cached
from .folders import folder_table
from .paths import check_path, expand_shards
from .shards import shard_batches
from .table import Table, plain_schema
from .text_files import read_json_lines, read_separated

_ROWS = 1024  # of a parquet file that are held at a time


def open_table(data: str, say: Callable[[str], None] = lambda _: None) -> Table:
    """Return the table of `--data`; its first use on a machine writes a file into the cache."""
    check_path(data)
    path = Path(data)
    with _reading(data):
        table = _open(data, path, say)
    if not len(table):
        raise UserError(f"{path} holds no rows; expected a text or a picture in each row")
    return table


@contextmanager
def _reading(data: str) -> Iterator[None]:
    """Turn an error of a file of the data into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--data: {str(error.filename or data)!r} cannot be read: {error.strerror or error}") from error


def _open(data: str, path: Path, say: Callable[[str], None]) -> Table:
    if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):  # of one data set, of several
        return _saved_dataset(path)
    read = {".parquet": _parquet_batches, ".csv": read_separated, ".tsv": read_separated, ".jsonl": read_json_lines}
    if path.suffix in read and path.is_file():
        return _cached(path, [path], lambda: read[path.suffix](path), say)
    shards = expand_shards(data)
    if shards:
        return _cached(path, shards, lambda: shard_batches(shards), say, f"{len(shards)} tar shards")
    # The files are listed at every start: a folder does not know when a picture deep in it has changed.
    return folder_table(path)


def _cached(path: Path, files: list[Path], batches: Batches, say: Callable[[str], None], *said: str) -> Table:

    def read() -> Iterator[Any]:
        with _reading(str(path)):
            yield from batches()

    is_parquet = path.suffix == ".parquet"
    arrow, lines = cached(files, read, lambda folder: _say_copy(path, folder, say) if is_parquet else None)
    return Table(path, _with_class_names(arrow), path.parent, (*said, *lines), tuple(files))


def _say_copy(path: Path, folder: Path, say: Callable[[str], None]) -> None:
    """Say that the pictures of a parquet file will be copied, with their size."""
    with _parquet_file(path) as file:
        columns = [file.schema.column(place) for place in range(len(file.schema))]
        places = [
            place for place, each in enumerate(columns)
            if each.physical_type.endswith("BYTE_ARRAY") and each.logical_type.type == "NONE"  # no texts
        ]  # fmt: skip
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    size = sum(group.column(place).total_uncompressed_size for group in groups for place in places)
    if size:
        say(f"the pictures inside of {path} are copied into {folder}, once: {amount(size)}")


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """Open a parquet file; UserError if it is none."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            yield file
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise UserError(f"{path} cannot be read as a parquet file: {' '.join(str(error).split())}") from error


def _parquet_batches(path: Path) -> Iterator[Any]:
    """Yield the record batches of a parquet file, with plain types, behind an empty one: no rows have a schema, too."""
    with _parquet_file(path) as file:
        schema = plain_schema(file.schema_arrow)
        yield pa.RecordBatch.from_arrays([pa.array([], kind) for kind in schema.types], schema=schema)
        for batch in file.iter_batches(batch_size=_ROWS):
            plain = batch.cast(schema)
            plain.validate(full=True)  # pyarrow reads texts that are not UTF-8
            yield plain


def _with_class_names(arrow: Any) -> Any:
    """Replace the numbers of classes by their names, where `datasets` has left the names in the file's metadata."""
    try:
        features = json.loads((arrow.schema.metadata or {})[b"huggingface"])["info"]["features"].items()
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):  # it has none, or they are damaged
        return arrow
    for name, feature in features:
        names = feature.get("names") if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" else None
        if isinstance(names, list) and name in arrow.column_names and pa.types.is_integer(arrow[name].type):
            valid = [str(each).encode(errors="replace").decode() for each in names]
            is_known = pc.and_(pc.greater_equal(arrow[name], 0), pc.less(arrow[name], len(names)))  # not -1
            texts = pc.take(pa.array(valid, pa.string()), pc.if_else(is_known, arrow[name], None))
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
        dataset = datasets.load_from_disk(str(path))
    except Exception as error:  # of many types, for damaged folders
        reason = " ".join(str(error).split())
        raise UserError(f"--data: {str(path)!r} cannot be loaded as a saved data set: {reason}") from error
    said: tuple[str, ...] = ()
    if isinstance(dataset, datasets.DatasetDict):
        if "train" not in dataset:
            raise UserError(
                f"--data: {str(path)!r} holds the data sets {', '.join(dataset)}; name one: "
                f"{str(path / next(iter(dataset)))!r}"
            )
        said = (f"of the data sets {', '.join(dataset)}, train",)
        dataset = dataset["train"]
    dataset = dataset.flatten_indices() if dataset._indices is not None else dataset
    arrow = dataset.data.table
    features = json.dumps({"info": {"features": dataset.features.to_dict()}}).encode()
    arrow = arrow.replace_schema_metadata({b"huggingface": features})
    files = tuple(Path(each["filename"]) for each in dataset.cache_files)
    return Table(path, _with_class_names(arrow.cast(plain_schema(arrow.schema))), path, said, files)
