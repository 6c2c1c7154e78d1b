"""Files of features: .parquet with the columns of the data, or .npy alone; written row by row, read tile by tile."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wholebatch.app import UserError, parse_json
from wholebatch.app.tensors import TensorFile

from ..data.sides import FilePictures, Texts
from ..data.tables.table import LINE, MEMBER, REASON, ROW, Table
from .items import Items
from .output import reading

COLUMN = "features"
TILE = 16384  # rows that are read at a time
_KEY = b"wholebatch"
_FORMAT = "wholebatch-features-1"
_PICTURE = "image"  # the column of a folder of pictures
_HIDDEN = {LINE: "wholebatch line", MEMBER: "wholebatch member", ROW: "wholebatch row"}  # without the code 0


def write_npy(file: Any, tiles: Iterable[Tensor], items: Items, width: int, _weights: str) -> None:
    """Write the features of the items, which come in tiles (m, width) of float32, in their order."""
    import numpy as np

    header = {"descr": "<f4", "fortran_order": False, "shape": (len(items), width)}
    np.lib.format.write_array_header_2_0(file, header)
    done = 0
    for tile in tiles:
        file.write(tile.contiguous().numpy().astype("<f4", copy=False).tobytes())
        done += len(tile)
    assert done == len(items)


def write_parquet(file: Any, tiles: Iterable[Tensor], items: Items, width: int, weights: str) -> None:
    """Write the same beside the columns of the items, with the hash of the weights of the model."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    repeated = _repeated_member(items.table)
    facts = {
        "format": _FORMAT, "weights": weights, "side": items.name, "column": items.column, "source": items.source,
        "folder": "" if items.table is None else str(items.table.folder.absolute()),
        "member": repeated, "captions": items.captions,
    }  # fmt: skip
    # An older column of features is left out, too.
    columns = _columns(items, {COLUMN, REASON, MEMBER} if repeated else {COLUMN, REASON})
    of_features = pa.field(COLUMN, pa.list_(pa.float32(), width), nullable=False)
    schema = columns.schema.append(of_features).with_metadata({_KEY: json.dumps(facts).encode()})
    done = 0
    with pq.ParquetWriter(file, schema, write_page_checksum=True) as writer:
        for tile in tiles:
            values = pa.FixedSizeListArray.from_arrays(pa.array(tile.flatten().numpy(), pa.float32()), width)
            rows = pa.array(items.rows[done : done + len(tile)].numpy())
            part = columns.take(rows).combine_chunks()
            writer.write_table(pa.table([*part.columns, values], schema=schema))
            done += len(tile)
    assert done == len(items)


def _columns(items: Items, left_out: Collection[str]) -> Any:
    """Return the columns of the data but for some, or for the embedded characters only a number, from 1."""
    import pyarrow as pa

    if items.table is None:
        return pa.table({"row": pa.array(range(1, int(items.rows.max()) + 2), pa.int64())})
    arrow = items.table.arrow
    arrow = arrow.select([name for name in arrow.column_names if name not in left_out])
    return arrow.rename_columns([_HIDDEN.get(name, name) for name in arrow.column_names])


def _repeated_member(table: Table | None) -> str:
    """Return the column whose values the names of the pictures of a folder repeat; "" for other data."""
    if table is None or not {MEMBER, _PICTURE} <= {*table.arrow.column_names}:
        return ""
    pictures, names = table.arrow[_PICTURE], table.arrow[MEMBER]
    return _PICTURE if pictures.type == names.type and pictures.equals(names) else ""


@dataclass(frozen=True)
class FeatureFile:
    """Features in a file, and the items that they are of, if the file has them."""

    path: Path
    count: int
    width: int
    items: Items | None = None
    """None: the file holds features alone."""
    weights: str = field(default="")
    """Hash of the weights of the model; "" if the file does not have it."""
    values: Any = field(default=None, repr=False)
    """The features of a .npy file, mapped into memory."""
    kept: TensorFile | None = field(default=None, repr=False)
    """The features in the folder of a run; they can be read, once, even after the file is removed."""

    def tiles(self, rows: int = TILE) -> Iterator[Tensor]:
        """Yield the features, (at most `rows`, width), in order; UserError for a damaged one."""
        done = 0
        with reading(self.path, "a file of features", (OSError, ValueError)):
            for tile in self._tiles(rows):
                if not (finite := tile.isfinite().all(1).int()).all():
                    row = done + int(finite.argmin()) + 1
                    raise UserError(f"{self.path}, row {row}: its features are not finite; embed the data again")
                done += len(tile)
                yield tile

    def _tiles(self, rows: int) -> Iterator[Tensor]:
        if self.kept is not None:
            with self.kept as file:
                yield from (file.read(str(number)) for number in range(len(file.entries)))
            return
        if self.values is not None:
            for start in range(0, self.count, rows):
                yield torch.from_numpy(self.values[start : start + rows].copy())
            return
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, memory_map=True, page_checksum_verification=True) as file:
            for batch in file.iter_batches(batch_size=rows, columns=[COLUMN]):
                flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
                yield torch.from_numpy(flat.reshape(-1, self.width).copy())


def has_features(path: str) -> bool:
    """Return whether a file holds features: a .npy file, or a .parquet file that `wholebatch embed` has written."""
    if Path(path).suffix == ".npy":
        return True
    if Path(path).suffix != ".parquet" or not Path(path).is_file():
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return _KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowInvalid, OSError):  # open_table says why
        return False


def open_features(path: Path) -> FeatureFile:
    """Open a file that `write_parquet` has written, or a .npy file of another program."""
    with reading(path, "a file of features", (Exception,)):  # numpy and pyarrow raise any kind for a damaged file
        return _open_npy(path) if path.suffix == ".npy" else _open_parquet(path)


def _open_npy(path: Path) -> FeatureFile:
    import numpy as np

    values = np.load(path, mmap_mode="r", allow_pickle=False)
    if values.ndim != 2 or values.dtype != np.float32 or not values.size:
        raise ValueError(f"expected float32 of the shape (rows, width), got {values.dtype} {values.shape}")
    count, width = values.shape
    return FeatureFile(path, count, width, values=values)


def _open_parquet(path: Path) -> FeatureFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(path)
    facts = parse_json(schema.metadata[_KEY], "its metadata")
    kind = schema.field(COLUMN).type
    if facts["format"] != _FORMAT or not pa.types.is_fixed_size_list(kind):
        raise ValueError("it is of another version")
    others = [name for name in schema.names if name != COLUMN]
    arrow = pq.read_table(path, columns=others, memory_map=True)
    shown = {name: hidden for hidden, name in _HIDDEN.items()}
    arrow = arrow.rename_columns([shown.get(name, name) for name in arrow.column_names])
    if facts.get("member") in others:
        arrow = arrow.append_column(MEMBER, arrow[facts["member"]])
    table = Table(Path(facts["source"]), arrow, Path(facts["folder"]))
    name, column = facts["side"], facts["column"]
    rows = torch.arange(len(table))
    items = None
    if column:
        side = FilePictures(table, column) if name == "image" else Texts(arrow[column])
        captions = facts.get("captions", "") if facts.get("captions") in others else ""
        items = Items(name, side, rows, facts["source"], table, column, captions)
    return FeatureFile(path, len(table), kind.list_size, items, facts["weights"])
