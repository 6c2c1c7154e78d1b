"""The contents of a report. Any task fills them: items are a text, a picture, or a picture with a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


class Item(NamedTuple):
    """A query or an answer."""

    text: str = ""
    picture: Image | None = None


class Candidate(NamedTuple):
    """An answer that the model gave."""

    item: Item
    similarity: float | None
    """None: not known."""
    right: bool


class Query(NamedTuple):
    """A query with its best candidates, the best one first."""

    item: Item
    candidates: Sequence[Candidate]
    rank: int | None
    """Of the best right answer, 1 if it comes first. None: below the candidates."""
    answer: Candidate | None = None
    """The best right answer, if none is among the candidates."""


class Gallery(NamedTuple):
    """Queries side by side, under a title."""

    title: str
    note: str
    queries: Sequence[Query]
    has_answers: bool = True
    """Whether it is known which candidates are right."""


class Line(NamedTuple):
    """A curve over the steps; a value that is None is left out."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]


class Chart(NamedTuple):
    """Curves in one pair of axes."""

    title: str
    lines: Sequence[Line]
    """At most six."""
    limits: tuple[float | None, float | None] = (None, None)
    """Of the vertical axis; None: those of the values."""
    note: str = ""
    marks: Sequence[float] = ()
    """Steps to mark by a vertical line."""


class Table(NamedTuple):
    """Rows of text; the first column names them."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Fact(NamedTuple):
    """A figure at the top of the report."""

    name: str
    value: str
    note: str = ""


class Setting(NamedTuple):
    """An option of the run."""

    name: str
    value: str
    default: str


class Evidence(NamedTuple):
    """The examples in a report and their similarities, as a task finds them."""

    galleries: Sequence[Gallery] = ()
    """Sheets of queries, such as examples drawn at random and the worst mistakes."""
    positives: Tensor = torch.empty(0)
    """(p,), similarities of what belongs together."""
    negatives: Tensor = torch.empty(0)
    """(n,), similarities of what does not."""
    note: str = ""
    """How the two were chosen."""


class Report(NamedTuple):
    """Everything that a page about a run, or about a search, shows; `page.render` makes the HTML from it alone."""

    title: str
    subtitle: str
    facts: Sequence[Fact] = ()
    """Figures at the top; the first is the headline."""
    table: Table | None = None
    """The figures of the test set, beside chance."""
    curves: Sequence[Chart] = ()
    evidence: Evidence = Evidence()
    audit: str = ""
    starts: Table | None = None
    settings: Sequence[Setting] = ()
    """All options; those that differ from the defaults are shown first."""
    versions: Sequence[tuple[str, str]] = ()
