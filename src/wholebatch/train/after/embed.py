"""`wholebatch embed`: the features of DATA in a file."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from .encode import Work, features_of
from .feature_files import COLUMN, write_npy, write_parquet
from .items import Items, open_items
from .open_run import OpenRun, device_of, open_run
from .options import EmbedConfig
from .output import say, written

_LINE_EVERY_S = 10


@dataclass(frozen=True)
class Again:
    """How another process opens the same items."""

    data: str
    argument: str
    column: str
    side: str

    def __call__(self, run: OpenRun) -> Items:
        """Open them, all rows of them."""
        return open_items(run, self.data, self.argument, column=self.column, side=self.side, skip_bad=None)


def embed(options: EmbedConfig) -> None:
    """Write the features.

    Raises:
        UserError: for a mistake in the options, the run or the data.
    """
    run = open_run(options.run, device_of(options.device, 0, options.ranks), options.weights, trust=options.trust)
    if run.weights_line:
        say(run.weights_line)
    work = Work.of(options)
    items = open_items(
        run, options.data, "DATA", column=options.column, side=options.side, skip_bad=options.skip_bad, say=say,
        workers=options.workers,
    )  # fmt: skip
    if options.out.suffix == ".parquet" and items.table is not None and COLUMN in items.table.names:
        say(f"the column {COLUMN!r} of {items.source} is left out of {options.out}: it is the name of the new features")
    again = Again(options.data, "DATA", items.column, items.name)
    tiles = with_progress(features_of(run, items, work, again), len(items))
    of = f"the column {items.column!r} of {items.source}" if items.column else items.source
    rows = "1 row" if len(items) == 1 else f"{len(items):,} rows"
    content = f"{rows} of {run.width} numbers, of {of}, by the encoder of the {items.name}"
    with written(options.out, content) as file:
        write = write_npy if options.out.suffix == ".npy" else write_parquet
        write(file, tiles, items, run.width, run.weights)


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
