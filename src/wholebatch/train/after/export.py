"""`wholebatch export`: a run's encoders in the folder layout of another library."""

from __future__ import annotations

from ..._base.user_error import UserError
from .export_open_clip import write_open_clip
from .export_sentence_transformers import write_sentence_transformers
from .open_run import open_run
from .options import ExportConfig
from .output import say

_WRITERS = {"sentence-transformers": write_sentence_transformers, "open_clip": write_open_clip}


def export(options: ExportConfig) -> None:
    """Write the folder.

    Raises:
        UserError: for a mistake in the options or the run, or encoders that the layout cannot express.
    """
    run = open_run(options.run, weights=options.weights, trust=options.trust)
    try:
        opens = _WRITERS[options.to](run, options.folder)
    except OSError as error:
        raise UserError(f"FOLDER: {str(options.folder)!r} cannot be written: {error.strerror or error}") from error
    say(f"{options.folder}: {opens}")
