"""Names that a command line offers, read from the source: importing the modules that declare them would import torch.

A loss `losses/<name>.py` with a line `DECLARATION = Declaration(<name>_loss, ...)` is in the catalog under its file's
name. `tests/test_catalog.py` compares these names with the imported modules. Without .py files this module cannot
be imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

_PACKAGE = Path(__file__).parent


class _Loss(NamedTuple):
    name: str
    swept: bool
    """The declaration has a `Sweep(...)`."""
    labeled: bool
    """The function takes labels."""


def _losses() -> Iterator[_Loss]:
    for path in sorted((_PACKAGE / "losses").glob("[!_]*.py")):
        source = path.read_text(encoding="utf-8")
        declaration = re.search(r"^DECLARATION = .*?\n(?=\S|\Z)", source, re.MULTILINE | re.DOTALL)
        if declaration is not None:
            parameters = re.search(rf"^def {path.stem}_loss\((.*?)\) ->", source, re.MULTILINE | re.DOTALL)
            labeled = parameters is not None and re.search(r"\blabels:", parameters[1]) is not None
            yield _Loss(path.stem, "Sweep(" in declaration[0], labeled)


def _exchanges() -> list[str]:
    source = (_PACKAGE / "exchange" / "select.py").read_text(encoding="utf-8")
    literal = re.search(r"^ExchangeUsed = Literal\[(.*?)\]", source, re.MULTILINE)
    return [] if literal is None else re.findall(r'"(\w+)"', literal[1])


_T = TypeVar("_T")


def _found(names: Callable[[], Iterable[_T]], kind: str) -> tuple[_T, ...]:
    """Return the names; raise ImportError if there are none, or no file to read."""
    try:
        found = (*names(),)
    except OSError:
        found = ()
    if not found:
        raise ImportError(
            f"wholebatch found no {kind} in the source files in {_PACKAGE}: it reads their names from .py files, which "
            "an installation must contain. Install wholebatch from its wheel or source distribution"
        )
    return found


_LOSSES = _found(_losses, "losses")
LOSS_NAMES: tuple[str, ...] = tuple(loss.name for loss in _LOSSES)
"""The losses with a standard call."""
SWEPT_LOSSES: tuple[str, ...] = tuple(loss.name for loss in _LOSSES if loss.swept)
"""The losses whose work is that of a sweep over the similarity matrix."""
LABELED_LOSSES: frozenset[str] = frozenset(loss.name for loss in _LOSSES if loss.labeled)
"""The losses that take one matrix of features and labels; the others take two matrices."""
EXCHANGE_NAMES: tuple[str, ...] = ("auto", *_found(_exchanges, "exchanges"))
"""The values of `exchange=`."""
