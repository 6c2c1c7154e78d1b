"""Words of a query that no text of the data has: the built-in encoder of texts has not learned them.

Its row of a text is the mean of the words' vectors, so an unknown word pulls the row to where chance has put it.
"""

from __future__ import annotations

import re
from typing import Any

from ..data.roles import text_column, usual_columns
from ..data.table import Table
from ..encoders.words import split_words
from .items import ROLES, Items
from .open_run import OpenRun


def unknown_words(run: OpenRun, query: str, side: str, found: Items, column: str = "") -> list[str]:
    """Return the words, in lower case, that no text beside the searched items has; [] if another encoder reads them.

    Args:
        run: the run.
        query: a text.
        side: the side that reads it.
        found: the searched items.
        column: the column of texts; "": the usual ones.
    """
    if run.config.text_encoder != "small" or found.table is None:
        return []
    columns = [column] if column else [found.column] if found.side.kind == "text" else _columns(found.table, side)
    texts = [text_column(found.table, "text", each) for each in columns]
    words = dict.fromkeys(split_words(query)) if texts else {}
    return [word.lower() for word in words if not any(_has(each, word) for each in texts)]


def _columns(table: Table, side: str) -> list[str]:
    return next((names for role in ROLES[side] if (names := usual_columns(table, role))), [])


def _has(texts: Any, word: str) -> bool:
    import pyarrow.compute as pc

    end = r"[^\pL]" if word[0].isalpha() else ""
    pattern = f"(?i)(^|{end}){re.escape(word)}({end}|$)"
    return bool(pc.any(pc.match_substring_regex(texts, pattern)).as_py())
