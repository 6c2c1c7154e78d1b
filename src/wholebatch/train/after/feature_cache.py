"""Features that `wholebatch search` has computed, in the folder of the run, by the digests of data and weights."""

from __future__ import annotations

from dataclasses import replace

from ..._user_error import UserError
from ..data.pictures.unreadable import readable_rows
from ..data.sides import FilePictures
from .embed import Again, with_progress
from .encode import Work, features_of
from .feature_files import FeatureFile, open_features, write_features
from .items import Items
from .open_run import OpenRun
from .output import say

FOLDER = "features"


def kept_features(run: OpenRun, items: Items, work: Work, argument: str, *, skip_bad: bool) -> FeatureFile:
    """Return the features of all these items, which are computed if the folder of the run does not have them.

    Args:
        run: the run.
        items: all rows of the data.
        work: how to compute.
        argument: the name of the data on the command line, for errors.
        skip_bad: leave out rows whose picture cannot be read.
    """
    if skip_bad and isinstance(items.side, FilePictures):
        items = replace(items, rows=readable_rows(items.side, say, workers=work.workers).rows)
    path = run.folder / FOLDER / f"{items.name}-{items.digest()[:16]}-{run.weights[:16]}.npy"
    try:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            say(f"embedding {len(items):,} rows of {items.source}, once: {path} keeps their features")
            again = Again(items.source, argument, items.column, items.name)
            tiles = with_progress(features_of(run, items, work, again), len(items))
            write_features(path, tiles, items, width=run.width, weights=run.weights)
    except OSError as error:
        raise UserError(
            f"{str(path.parent)!r} cannot be written or read ({error.strerror or error}); write the features elsewhere "
            "with `wholebatch embed`, and search them with --in FILE.parquet"
        ) from error
    found = open_features(path)
    if (found.count, found.width) != (len(items), run.width):
        raise UserError(f"{path} is damaged: it has {found.count} features, expected {len(items)}; remove it")
    return FeatureFile(path, found.count, found.width, items, run.weights)
