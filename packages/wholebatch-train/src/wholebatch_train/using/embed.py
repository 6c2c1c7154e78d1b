"""`wholebatch embed`: files of features, .parquet with the columns of the data, or .npy alone.

They are written row by row, and read tile by tile.

`wholebatch search` keeps the features that it computes in the folder of the run, one file for a side of some data and a
kind of weights: the final, the best and the last checkpoint's. A file is replaced when the run has other weights of its
kind; a search that reads it goes on, since it is open. Pages have checksums, which are verified when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from wholebatch.app import UserError, open_regular, parse_json, replacing

from ..data.sides import FilePictures, Texts
from ..data.table import LINE, MEMBER, REASON, ROW, Table
from .items import Items, features_of, open_items, opened, with_progress
from .open_run import OpenRun
from .options import EmbedConfig, EncodingOptions
from .output import reading, say, written

COLUMN = "features"
FOLDER = "features"
_DIGITS = 16  # of a hash, in the name of a file
TILE = 16384  # rows that are read at a time
_KEY = b"wholebatch"
_FORMAT = "wholebatch-features-1"
_PICTURE = "image"  # the column of a folder of pictures
_HIDDEN = {LINE: "wholebatch line", MEMBER: "wholebatch member", ROW: "wholebatch row"}  # without the code 0


def write_npy(file: Any, tiles: Iterable[Tensor], items: Items, width: int, _weights: str) -> None:
    """Write the features of the items, which come in tiles (m, width) of float32, in their order."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (len(items), width)}
    np.lib.format.write_array_header_2_0(file, header)
    done = 0
    for tile in tiles:
        file.write(tile.contiguous().numpy().astype("<f4", copy=False).tobytes())
        done += len(tile)
    assert done == len(items)


def write_parquet(file: Any, tiles: Iterable[Tensor], items: Items, width: int, weights: str, digest: str = "") -> None:
    """Write the same beside the columns of the items, with the hash of the weights of the model, and of the items."""
    repeated = _repeated_member(items.table)
    facts = {
        "format": _FORMAT, "weights": weights, "side": items.name, "column": items.column, "source": items.source,
        "folder": "" if items.table is None else str(items.table.folder.absolute()),
        "member": repeated, "captions": items.captions, "digest": digest,
    }  # fmt: skip
    # An older column of features is left out, too.
    columns = _columns(items, {COLUMN, REASON, MEMBER} if repeated else {COLUMN, REASON})
    feature_field = pa.field(COLUMN, pa.list_(pa.float32(), width), nullable=False)
    schema = columns.schema.append(feature_field).with_metadata({_KEY: json.dumps(facts).encode()})
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
    """Features in an open file, and the items that they are of, if the file has them."""

    path: Path
    file: pq.ParquetFile
    items: Items | None
    weights: str
    """Hash of the weights of the model."""
    digest: str
    """That of the items, where the file does not have them."""

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and of features in each."""
        return self.file.metadata.num_rows, self.file.schema_arrow.field(COLUMN).type.list_size

    def tiles(self) -> Iterator[Tensor]:
        """Yield the features, (at most `TILE`, width), in order; UserError for a damaged one."""
        done, (_, width) = 0, self.shape
        with reading(self.path, "a file of features", (OSError, ValueError)):
            for batch in self.file.iter_batches(batch_size=TILE, columns=[COLUMN]):
                flat = batch.column(0).flatten().to_numpy(zero_copy_only=False)
                tile = torch.from_numpy(flat.reshape(-1, width).copy())
                if not (finite := tile.isfinite().all(1).int()).all():
                    row = done + int(finite.argmin()) + 1
                    raise UserError(f"{self.path}, row {row}: its features are not finite; embed the data again")
                done += len(tile)
                yield tile


def has_features(path: str) -> bool:
    """Return whether a file holds features: it is one that `wholebatch embed` has written."""
    if Path(path).suffix != ".parquet" or not Path(path).is_file():
        return False
    try:
        return _KEY in (pq.read_schema(path).metadata or {})
    except (pa.ArrowInvalid, OSError):  # open_table says why
        return False


def open_features(path: Path) -> FeatureFile:
    """Open a file that `write_parquet` has written."""
    with reading(path, "a file of features", (Exception,)):  # pyarrow raises any kind for a damaged file
        file = pq.ParquetFile(path, memory_map=True, page_checksum_verification=True)
        schema = file.schema_arrow
        facts = parse_json(schema.metadata[_KEY], "its metadata")
        kind = schema.field(COLUMN).type
        if facts["format"] != _FORMAT or not pa.types.is_fixed_size_list(kind) or kind.value_type != pa.float32():
            raise ValueError("it is of another version")
        items = _items_in(file, facts) if facts["column"] else None
        return FeatureFile(path, file, items, facts["weights"], facts["digest"])


def _items_in(file: Any, facts: dict[str, Any]) -> Items:
    """Return the items of the columns that stand beside the features."""
    others = [name for name in file.schema_arrow.names if name != COLUMN]
    arrow = file.read(columns=others)
    shown = {name: hidden for hidden, name in _HIDDEN.items()}
    arrow = arrow.rename_columns([shown.get(name, name) for name in arrow.column_names])
    if facts.get("member") in others:
        arrow = arrow.append_column(MEMBER, arrow[facts["member"]])
    table = Table(Path(facts["source"]), arrow, Path(facts["folder"]))
    name, column = facts["side"], facts["column"]
    side = FilePictures(table, column) if name == "image" else Texts(arrow[column])
    captions = facts.get("captions", "") if facts.get("captions") in others else ""
    return Items(name, side, torch.arange(len(table)), facts["source"], table, column, captions)


def kept_features(run: OpenRun, items: Items, options: EncodingOptions) -> FeatureFile:
    """Return the features of all these items, which are computed if the folder of the run does not have them."""
    digest = items.digest()[:_DIGITS]
    path = run.folder / FOLDER / f"{items.name}-{digest}-{run.kind_of_weights}.parquet"
    if path.parent.is_symlink():
        raise UserError(f"{path.parent} is a link; expected the folder itself: remove it")
    try:
        path.parent.mkdir(exist_ok=True)
        kept = _open_kept(path) if path.exists() else None
        if kept is None or kept.weights != run.weights:
            say(f"embedding {len(items):,} rows of {items.source}, once: {path} keeps their features")
            tiles = with_progress(features_of(run, items, options), len(items))
            with replacing(path) as file:
                write_parquet(file, tiles, replace(items, table=None, column=""), run.width, run.weights, digest)
            kept = _open_kept(path)
            if kept.weights != run.weights:
                raise UserError(f"{path} was replaced meanwhile by features of other weights; run this command again")
    except OSError as error:
        raise UserError(
            f"{str(path.parent)!r} cannot be written or read ({error.strerror or error}); write the features elsewhere "
            "with `wholebatch embed`, and search them with --in FILE.parquet"
        ) from error
    if (kept.digest, kept.shape) != (digest, (len(items), run.width)):
        raise _damaged(path)
    return replace(kept, items=items)


def _open_kept(path: Path) -> FeatureFile:
    try:
        open_regular(path).close()
        return open_features(path)
    except UserError as error:
        raise _damaged(path) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged, or has features of other rows; remove it")


def embed(options: EmbedConfig) -> None:
    run = opened(options)
    items = open_items(
        run, options.data, "DATA", column=options.column, side=options.side, skip_bad=options.skip_bad, say=say,
        workers=options.workers,
    )  # fmt: skip
    if options.out.suffix == ".parquet" and items.table is not None and COLUMN in items.table.names:
        say(f"the column {COLUMN!r} of {items.source} is left out of {options.out}: it is the name of the new features")
    tiles = with_progress(features_of(run, items, options), len(items))
    origin = f"the column {items.column!r} of {items.source}" if items.column else items.source
    rows = "1 row" if len(items) == 1 else f"{len(items):,} rows"
    content = f"{rows} of {run.width} numbers, of {origin}, by the encoder of the {items.name}"
    with written(options.out, content) as file:
        write = write_npy if options.out.suffix == ".npy" else write_parquet
        write(file, tiles, items, run.width, run.weights)
