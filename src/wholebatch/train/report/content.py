"""The contents of a report. Any task fills them: items are a text, a picture, or a picture with a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Item:
    """A query or an answer."""

    text: str = ""
    picture: Image | None = None


@dataclass(frozen=True)
class Candidate:
    """An answer that the model gave."""

    item: Item
    similarity: float | None
    """None: not known."""
    right: bool


@dataclass(frozen=True)
class Query:
    """A query with its best candidates, the best one first."""

    item: Item
    candidates: Sequence[Candidate]
    rank: int | None
    """Of the best right answer, 1 if it comes first. None: below the candidates."""
    answer: Candidate | None = None
    """The best right answer, if none is among the candidates."""


@dataclass(frozen=True)
class Gallery:
    """Queries side by side, under a title."""

    title: str
    note: str
    queries: Sequence[Query]


@dataclass(frozen=True)
class Line:
    """A curve over the steps; a value that is None is left out."""

    label: str
    steps: Sequence[float]
    values: Sequence[float | None]


@dataclass(frozen=True)
class Chart:
    """Curves in one pair of axes.

    Args:
        title: above the chart.
        lines: at most six.
        limits: of the vertical axis; None: those of the values.
        note: below the title.
        marks: steps to mark by a vertical line.
    """

    title: str
    lines: Sequence[Line]
    limits: tuple[float | None, float | None] = (None, None)
    note: str = ""
    marks: Sequence[float] = ()


@dataclass(frozen=True)
class Table:
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


def _nothing() -> Tensor:
    return torch.empty(0)


@dataclass(frozen=True)
class Evidence:
    """The examples in a report and their similarities, as a task finds them.

    Args:
        galleries: sheets of queries, such as examples drawn at random and the worst mistakes.
        positives: (p,), similarities of what belongs together.
        negatives: (n,), similarities of what does not.
        note: how the two were chosen.
    """

    galleries: Sequence[Gallery] = ()
    positives: Tensor = field(default_factory=_nothing)
    negatives: Tensor = field(default_factory=_nothing)
    note: str = ""


@dataclass(frozen=True)
class Report:
    """Everything that the report of a run shows; `page.render` makes the HTML from it alone.

    Args:
        title: what was trained.
        subtitle: a line below it, such as the name of the run folder.
        facts: figures at the top; the first is the headline.
        table: the figures of the test set, beside chance.
        curves: over the steps.
        evidence: examples and similarities.
        plan: a line about the planned cost of the loss; "": none.
        audit: a line about the audit of the gradient; "": none.
        starts: when, at which step and on what the run was started.
        settings: all options; those that differ from the defaults are shown first.
        versions: names and versions of software.
    """

    title: str
    subtitle: str
    facts: Sequence[Fact]
    table: Table
    curves: Sequence[Chart] = ()
    evidence: Evidence = field(default_factory=Evidence)
    plan: str = ""
    audit: str = ""
    starts: Table | None = None
    settings: Sequence[Setting] = ()
    versions: Sequence[tuple[str, str]] = ()
