"""Features that `wholebatch search` has computed, in the folder of the run, by the digests of data and weights.

A file of other weights of the same data and side is removed once the run does not have these weights any more. A
search that reads it goes on, since it has mapped the file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..._user_error import UserError
from .embed import Again, with_progress
from .encode import Work, features_of
from .feature_files import FeatureFile, open_features, write_features
from .items import Items
from .open_run import OpenRun, weights_of
from .output import say

FOLDER = "features"
_DIGITS = 16  # of a hash, in the name of a file


def kept_features(run: OpenRun, items: Items, work: Work, argument: str) -> FeatureFile:
    """Return the features of all these items, which are computed if the folder of the run does not have them.

    Args:
        run: the run.
        items: the rows of the data.
        work: how to compute.
        argument: the name of the data on the command line, for errors.
    """
    data = f"{items.name}-{items.digest()[:_DIGITS]}"
    path = run.folder / FOLDER / f"{data}-{run.weights[:_DIGITS]}.npy"
    try:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            say(f"embedding {len(items):,} rows of {items.source}, once: {path} keeps their features")
            again = Again(items.source, argument, items.column, items.name)
            tiles = with_progress(features_of(run, items, work, again), len(items))
            write_features(path, tiles, items, width=run.width, weights=run.weights)
            _remove_old(run, path.parent, data)
    except OSError as error:
        raise UserError(
            f"{str(path.parent)!r} cannot be written or read ({error.strerror or error}); write the features elsewhere "
            "with `wholebatch embed`, and search them with --in FILE.parquet"
        ) from error
    found = open_features(path)
    if (found.count, found.width) != (len(items), run.width):
        raise UserError(f"{path} is damaged: it has {found.count} features, expected {len(items)}; remove it")
    return replace(found, items=items, weights=run.weights)


def _remove_old(run: OpenRun, folder: Path, data: str) -> None:
    """Remove the features of these data by weights that the run does not have any more."""
    try:
        present = {weights[:_DIGITS] for weights in (run.weights, *weights_of(run))}
    except UserError as error:
        say(
            f"note: features of earlier weights are left in {folder}, because it is not known which are in use: {error}"
        )
        return
    for path in folder.glob(f"{data}-{'[0-9a-f]' * _DIGITS}.npy"):
        is_written = path.with_name(f"{path.name}.partial").exists()  # by another process, perhaps
        if path.stem.rpartition("-")[2] in present or is_written:
            continue
        try:
            path.unlink(missing_ok=True)
        except PermissionError as error:  # on Windows, while another process reads it
            say(f"note: {path} has features of earlier weights, and cannot be removed: {error.strerror or error}")
