"""Features that `wholebatch search` has computed, in the folder of the run, one file for a side of some data.

They are tensors of some rows each, which are verified when they are read. The features of the final, the best and the
last checkpoint's weights have a file each. It is replaced when the run has other weights of this kind; a search that
reads it goes on, since it is open.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import torch

from wholebatch.app import UserError
from wholebatch.app.tensors import TensorFile, write_tensors

from .embed import with_progress
from .encode import features_of
from .feature_files import TILE, FeatureFile
from .items import Items
from .open_run import OpenRun
from .options import EncodingOptions
from .output import reading, say

FOLDER = "features"
_DIGITS = 16  # of a hash, in the name of a file


def kept_features(run: OpenRun, items: Items, options: EncodingOptions, argument: str) -> FeatureFile:
    """Return the features of all these items, which are computed if the folder of the run does not have them.

    Args:
        run: the run.
        items: the rows of the data.
        options: how to compute.
        argument: the name of the data on the command line, for errors.
    """
    data = f"{items.name}-{items.digest()[:_DIGITS]}"
    path = run.folder / FOLDER / f"{data}-{run.kind_of_weights}.safetensors"
    if path.parent.is_symlink():
        raise UserError(f"{path.parent} is a link; expected the folder itself: remove it")
    expected = {
        str(number): torch.empty(len(part), run.width, dtype=torch.float32, device="meta")
        for number, part in enumerate(items.rows.split(TILE))
    }
    facts = {"rows": data, "weights": run.weights}
    try:
        path.parent.mkdir(exist_ok=True)
        kept = _open(path) if path.exists() else None
        if kept is None or kept.metadata.get("weights") != run.weights:
            if kept is not None:
                kept.close()
            say(f"embedding {len(items):,} rows of {items.source}, once: {path} keeps their features")
            tiles = with_progress(features_of(run, items, options, argument), len(items))
            rows = (row for tile in tiles for row in tile.split(1))
            write_tensors(path, expected, facts, (torch.cat([*islice(rows, len(x))]) for x in expected.values()))
            kept = _open(path)
            if kept.metadata.get("weights") != run.weights:
                kept.close()
                raise UserError(f"{path} was replaced meanwhile by features of other weights; run this command again")
    except OSError as error:
        raise UserError(
            f"{str(path.parent)!r} cannot be written or read ({error.strerror or error}); write the features elsewhere "
            "with `wholebatch embed`, and search them with --in FILE.parquet"
        ) from error
    layout = {name: (entry.shape, entry.dtype) for name, entry in kept.entries.items()}
    if (kept.metadata, layout) != (facts, {name: (x.shape, x.dtype) for name, x in expected.items()}):
        kept.close()
        raise UserError(f"{path} is damaged, or has features of other rows; remove it")
    return FeatureFile(path, len(items), run.width, items, run.weights, kept=kept)


def _open(path: Path) -> TensorFile:
    with reading(path, "features", (OSError,), named=(ValueError,)):
        return TensorFile(path)
