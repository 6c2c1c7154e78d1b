"""What `wholebatch plan` shows: the table of a plan, and predictions beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from .._display import print_in_full
from .check import Measured
from .options import Plan
from .table import amount, duration, headline, lines, remarks


def print_plan(plan: Plan) -> None:
    """The table, and what to paste."""
    header, *options = lines(plan)
    shown = _table(headline(plan), header, left=("exchange", "similarities", "encoders"))
    for option, cells in zip(plan.options, options, strict=True):
        style = "bold green" if option is plan.chosen else None if option.fits else "dim"
        shown.add_row(*map(escape, cells), style=style)
    console = print_in_full(shown)
    for line in remarks(plan):
        console.print(escape(line), highlight=False, soft_wrap=True)


def print_measured(found: Sequence[Measured]) -> None:
    """Predicted, measured, and by how much they differ; and which was fastest."""
    header = ("", "batch", "exchange", "memory", "of the loss", "measured", "error", "time", "measured", "error")
    title = "the loss on this machine, its memory beside the features': predicted, measured"
    shown = _table(title, header, left=("exchange", "memory"))
    fastest = min(found, key=lambda of: of.seconds / of.shapes.batch**2)  # a batch may have been halved
    for of in found:
        peak = ["-", "-"] if of.bytes is None else [amount(of.bytes), _error(of.predicted_bytes, of.bytes)]
        cells = [
            "fastest" if of is fastest and len(found) > 1 else "",
            str(of.shapes.batch),
            of.exchange if of.shapes.ranks > 1 else "-",
            str(of.memory),
        ]
        cells += [amount(of.predicted_bytes), *peak]
        cells += [duration(of.predicted_seconds), duration(of.seconds), _error(of.predicted_seconds, of.seconds)]
        shown.add_row(*cells)
    print_in_full(shown)


def _table(title: str, header: Sequence[str], *, left: Sequence[str]) -> Table:
    shown = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD)
    for name in header:
        shown.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return shown


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
