"""Words of queries that no text of a run's data has: the built-in encoder of texts has not learned them.

It only knows pieces of such a word, if any, so the query's row is partly where chance has put it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..data.tables.list_columns import in_rows
from ..data.tables.roles import find_roles, text_column
from ..data.tables.table import Table
from ..encoders.words import in_upper_case, split_words
from .open_run import OpenRun

_ROWS = 8192  # texts that are searched at a time
_FEW = 32  # words that are looked for one by one; the words of the texts are listed for more
_SHOWN = 10
# Thai to Myanmar, Khmer, kana and Han are written without spaces: a word is wherever its characters are.
_WITHOUT_SPACES = re.compile("[\u0e00-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U000323af]")


def unknown_words(run: OpenRun, queries: Sequence[str], side: str, table: Table | None) -> list[str]:
    """Return the words, in lower case, that no text which the encoder has read has; [] for another encoder's texts.

    The texts are read once, however many queries there are.

    Args:
        run: the run.
        queries: texts.
        side: the side that reads them.
        table: the data of the run. None: the embedded characters.
    """
    if run.config.text_encoder != "small" or table is None:
        return []
    roles = [*find_roles(table, run.config.columns, task=run.config.task).items()][:2]
    columns = [
        text_column(in_rows(table, names[:1])[0], role, names[0], {})
        for name, (role, names) in zip(run.sides, roles, strict=True)
        if run.encoder(name) is run.encoder(side)
    ]
    left = dict.fromkeys(word for query in queries for word in split_words(query))
    for texts in (some for column in columns for some in _parts(column)):
        listed = {*split_words(texts)} if len(left) > _FEW else set()
        left = {word: None for word in left if word not in listed and not _has_word(texts, word, listed=bool(listed))}
        if not left:
            break
    return [word.lower() for word in left]


def note_of(words: Sequence[str]) -> str:
    """Return the line about these words."""
    shown = ", ".join(f'"{word}"' for word in words[:_SHOWN])
    more = f" and {len(words) - _SHOWN:,} more" if len(words) > _SHOWN else ""
    return f"note: no text of the data has {shown}{more}; the built-in encoder only knows the words of your texts"


def _parts(column: Any) -> Iterator[str]:
    """Yield the texts in upper case, many at a time, a line each."""
    for start in range(0, len(column), _ROWS):
        yield in_upper_case("\n".join(column.slice(start, _ROWS).to_pylist()))


def _has_word(texts: str, word: str, *, listed: bool) -> bool:
    """Return whether a word in upper case is in texts in upper case; `listed`: it is not among their words."""
    if _WITHOUT_SPACES.search(word):
        return word in texts
    if listed or word not in texts:  # which is found out much faster
        return False
    return any(word in split_words(line) for line in texts.split("\n") if word in line)
