"""`wholebatch embed`: the features of DATA in a file."""

from __future__ import annotations

from .feature_files import COLUMN, write_npy, write_parquet
from .items import features_of, open_items, opened, with_progress
from .options import EmbedConfig
from .output import say, written


def embed(options: EmbedConfig) -> None:
    """Write the features."""
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
