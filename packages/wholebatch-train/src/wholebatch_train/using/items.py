"""The rows of one column of DATA, as one side's encoder reads them, and their features."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from pathlib import Path

import pyarrow as pa
import torch
from torch import Tensor

from wholebatch.app import UserError

from ..config import for_glyphs
from ..data.cache import stamp_of_pictures
from ..data.classes import glyph_pairs
from ..data.loader import WorkerDiedError, prepared, workers_of_a_rank
from ..data.open_table import open_table
from ..data.paths import PICTURES
from ..data.pictures import readable_rows, rows_with_texts
from ..data.roles import USUAL, asked_roles, text_column, usual_columns
from ..data.sides import FilePictures, Side, Texts
from ..data.table import Table, digest_of, in_rows, is_bytes, is_text
from ..encoders.encoder import to_device
from ..encoders.small import TextEncoder
from ..encoders.words import identity
from ..ranks.all_ranks import device_of
from ..tasks.batches import Reader
from .open_run import OpenRun, open_run
from .options import EncodingOptions, renamed
from .output import say

_LINE_EVERY_S = 10

# The names of the usual columns of a side; a text is read by the encoder of queries, too, and so on.
ROLES = {
    "image": ("image",),
    "text": ("text", "label", "query", "positive"),
    "query": ("query", "text", "positive", "label"),
    "document": ("positive", "text", "query", "label"),
}


@dataclass(frozen=True)
class Items:
    """The items of one side."""

    name: str
    """The side's name in the model."""
    side: Side
    rows: Tensor
    """Numbers of the rows, in the order of the data: all, or those whose picture can be read."""
    source: str
    """The name of the data; messages begin with it."""
    table: Table | None = None
    """None: the embedded characters, which are no table."""
    column: str = ""
    captions: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, row: int) -> str:
        """Return the place of a row in words: the path of a picture, or the line of a text."""
        if self.table is None:
            return f"{self.source}, row {row + 1}"
        if isinstance(self.side, FilePictures):
            place = self.side.place(row)
            if isinstance(place, Path):
                return str(place)
        return self.table.where(row)

    def text(self, row: int) -> str:
        """Return the text of a row, or that beside its picture; "" if there is none."""
        if self.side.kind == "text":
            return str(self.side.items(torch.tensor([row]))[0])
        return str(self.table.arrow[self.captions][row].as_py() or "") if self.table and self.captions else ""

    def digest(self) -> str:
        """Return a hash of the items; files with pictures count by their path, size and time of the last change."""
        if isinstance(self.side, FilePictures):
            content = stamp_of_pictures(self.side)
        else:
            content = self.source if self.table is None else digest_of(self.table.arrow[self.column])
        return hashlib.sha256((repr((self.name, self.column, self.rows.tolist())) + content).encode()).hexdigest()


def open_items(
    run: OpenRun,
    data: str,
    argument: str,
    *,
    column: str = "",
    side: str | None = None,
    skip_bad: bool = False,
    say: Callable[[str], None] = lambda _: None,
    workers: int = 0,
) -> Items:
    check_side(run, side)
    if data == "glyphs":
        name = side or run.sides[0]
        pairs = glyph_pairs(for_glyphs(run.config).image_size)
        glyph_side = next(side for side in pairs.sides.values() if side.kind == run.kind(name))
        return Items(name, glyph_side, torch.arange(len(pairs.order)), "glyphs")
    try:
        table = open_table(data, say)
        for line in table.said:
            say(line)
        name, column = find_column(run, table, column, side)
        if run.kind(name) == "image":
            pictures = FilePictures(table, column)
            rows = readable_rows(pictures, say, workers=workers)[0] if skip_bad else torch.arange(len(table))
            return Items(name, pictures, rows, data, table, column, _captions(run, table))
        table, _ = in_rows(table, [column])
        empty: dict[int, str] | None = {} if skip_bad else None
        texts = Texts(text_column(table, name, column, empty))
        return Items(name, texts, rows_with_texts(table, empty or {}, say)[0], data, table, column)
    except UserError as error:
        raise renamed(error, argument) from error


def _captions(run: OpenRun, table: Table) -> str:
    """Return the column of the texts beside pictures, as the run or the usual names have it; "" if there is none."""
    asked, columns = asked_roles(run.config.columns), list[str]()
    for role in ("text", "label"):
        columns += [*asked.get(role, ()), *(name for name in table.names if name.lower() in USUAL[role])]
    return next((name for name in columns if name in table.names and is_text(table.arrow[name].type)), "")


def distinct(run: OpenRun, items: Items) -> Items:
    """Return the first row of each text that the encoder tells from others; pictures stay as they are."""
    if items.side.kind != "text":
        return items
    same = identity if isinstance(run.encoder(items.name), TextEncoder) else str
    first = {same(text): place for place, text in reversed([*enumerate(items.side.items(items.rows))])}
    return replace(items, rows=items.rows[sorted(first.values())])


def check_side(run: OpenRun, side: str | None) -> None:
    """Raise UserError unless the run has this side; None is any."""
    if side is not None and side not in run.sides:
        raise UserError(f"--side must be a side of the run, which has {', '.join(run.sides)}; got {side}")


def find_column(run: OpenRun, table: Table, column: str, side: str | None) -> tuple[str, str]:
    if column and column not in table.names:
        raise UserError(f"--column: {table.source} has no column {column!r}; its columns are {', '.join(table.names)}")
    if column:
        return side or _side_of(run, table, column), column
    for name in (side,) if side else run.sides:
        for role in ROLES[name]:
            if columns := usual_columns(table, role, "--column "):
                return name, columns[0]
    names = [ROLES[name][0] for name in ((side,) if side else run.sides)]
    usual = ", ".join(dict.fromkeys(each for role in names for each in USUAL[role]))
    raise UserError(
        f"{table.source} has no column for the {' or the '.join(names)}; its columns are {', '.join(table.names)}. "
        f"Name one with --column NAME (usual names need no option: {usual})"
    )


def _side_of(run: OpenRun, table: Table, column: str) -> str:
    """Return the side that reads a column: by its values, and where two sides read texts, by its name."""
    kind = "image" if _holds_pictures(table, column) else "text"
    sides = [name for name in run.sides if run.kind(name) == kind]
    if not sides:
        raise UserError(
            f"--column: {table.source} has {kind}s in the column {column!r}, and the run has no encoder of {kind}s"
        )
    if len(sides) == 1:
        return sides[0]
    return "query" if column.lower() in USUAL["query"] else "document"


def _holds_pictures(table: Table, column: str) -> bool:
    values = table.arrow[column]
    if is_text(values.type):
        return os.path.splitext(values[0].as_py() or "")[1].lower() in PICTURES
    return pa.types.is_struct(values.type) or is_bytes(values.type)


def opened(options: EncodingOptions) -> OpenRun:
    """Open the run of a command, and print a line about weights that are not the final ones."""
    run = open_run(options.run, device_of(options.device, 0, 1), options.weights, trust=options.trust)
    if run.weights_line:
        say(run.weights_line)
    return run


def features_of(run: OpenRun, items: Items, options: EncodingOptions) -> Iterator[Tensor]:
    """Yield the features of the items, (at most `options.batch_size`, width), in order.

    The GPUs of this machine take turns: each encodes while the others still do.
    """
    parts = [*items.rows.split(options.batch_size)]
    replicas = [run, *(run.on(device) for device in _further_devices(run.device)[: len(parts) - 1])]
    encoded = deque[Tensor]()
    try:
        prepare = partial(Reader.of(run.encoder(items.name)), items.side)
        read = prepared(prepare, parts, workers=_workers(items, options))
        for replica, inputs in zip(cycle(replicas), read, strict=False):
            encoded.append(replica.encode(items.name, to_device(inputs, replica.device)))
            if len(encoded) == len(replicas):
                yield run.finite(encoded.popleft().cpu())
        for features in encoded:
            yield run.finite(features.cpu())
    except WorkerDiedError as error:
        raise UserError(f"a process that reads the rows {error}") from error


def _workers(items: Items, options: EncodingOptions) -> int:
    """Return how many processes read pictures; none, unless they are asked for, where one batch holds all."""
    is_quick = options.workers < 0 and len(items) <= options.batch_size
    return 0 if is_quick else workers_of_a_rank(options.workers, [items.side], 1)


def _further_devices(first: torch.device) -> list[torch.device]:
    """Return the other GPUs of this machine, if the first one is a GPU."""
    count = torch.cuda.device_count() if first.type == "cuda" else 0
    return [device for number in range(count) if (device := torch.device("cuda", number)) != first]


def with_progress(tiles: Iterable[Tensor], count: int) -> Iterator[Tensor]:
    """Yield the tiles; print a line every ten seconds."""
    began = last = time.monotonic()
    done = 0
    for tile in tiles:
        yield tile
        done += len(tile)
        now = time.monotonic()
        if now - last >= _LINE_EVERY_S and done < count:
            last = now
            say(f"{done:,} of {count:,} rows, {now - began:.0f} s")
