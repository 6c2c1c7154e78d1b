"""What `wholebatch plan` shows: the table of a plan, and predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .check import Measured
from .options import Plan
from .table import amount, duration, headline, lines, remarks

_ANY = 10_000  # columns


def print_plan(plan: Plan) -> None:
    """The table, and what to paste."""
    header, *options = lines(plan)
    shown = _table(headline(plan), header, left=("exchange", "similarities", "encoders"))
    for option, cells in zip(plan.options, options, strict=True):
        style = "bold green" if option is plan.chosen else None if option.fits else "dim"
        shown.add_row(*map(escape, cells), style=style)
    console = _print(shown)
    for line in remarks(plan):
        console.print(escape(line), highlight=False, soft_wrap=True)


def print_measured(found: Sequence[Measured]) -> None:
    """Predicted, measured, and by how much they differ."""
    header = ("batch", "exchange", "memory", "peak", "measured", "error", "time", "measured", "error")
    shown = _table("the loss on this machine: predicted, measured", header, left=("exchange", "memory"))
    for of in found:
        peak = ["-", "-"] if of.bytes is None else [amount(of.bytes), _error(of.predicted_bytes, of.bytes)]
        cells = [str(of.shapes.batch), of.exchange if of.shapes.ranks > 1 else "-", str(of.memory)]
        cells += [amount(of.predicted_bytes), *peak]
        cells += [duration(of.predicted_seconds), duration(of.seconds), _error(of.predicted_seconds, of.seconds)]
        shown.add_row(*cells)
    _print(shown)


def _table(title: str, header: Sequence[str], *, left: Sequence[str]) -> Table:
    shown = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        shown.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return shown


def _print(shown: Table) -> Console:
    """In full, wherever it goes: a line that is too long for a terminal is its own to break."""
    needed = Console(width=_ANY).measure(shown).maximum
    console = Console(width=max(Console().width, needed))
    console.print(shown)
    return console


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
