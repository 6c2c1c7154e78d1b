"""`wholebatch export`: a run's encoders in the folder layout of another library."""

from __future__ import annotations

from wholebatch.app import writing

from .export_open_clip import write_open_clip
from .export_sentence_transformers import write_sentence_transformers
from .open_run import open_run
from .options import ExportConfig
from .output import say

_WRITERS = {"sentence-transformers": write_sentence_transformers, "open_clip": write_open_clip}


def export(options: ExportConfig) -> None:
    """Write the folder."""
    run = open_run(options.run, weights=options.weights, trust=options.trust)
    with writing(f"FOLDER: {str(options.folder)!r}"):
        opens = _WRITERS[options.to](run, options.folder)
    say(f"{options.folder}: {opens}")
