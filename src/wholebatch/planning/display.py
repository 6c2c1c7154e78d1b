"""Print the tables of `wholebatch plan`: the options, and predictions with measurements."""

from __future__ import annotations

from collections.abc import Sequence

from .._cli.display import print_table, print_text
from .check import Measured
from .report import LEFT, Plan, headline, remarks, table
from .units import amount, duration

_HEADER = (
    "batch size", "exchange", "memory", "bytes predicted", "bytes measured", "bytes error", "time predicted",
    "time measured", "time error", "remark",
)  # fmt: skip


def print_plan(plan: Plan) -> None:
    """Print the table, and the calls to paste."""
    header, *rows = table(plan)
    styles = ["bold green" if o is plan.chosen else "" if o.fits else "dim" for o in plan.options]
    print_table(headline(plan), header, rows, left=LEFT, styles=styles)
    for line in remarks(plan):
        print_text(line)


def print_measured(found: Sequence[Measured]) -> None:
    """Print predictions, measurements and errors, and mark the fastest option."""
    fastest = min(found, key=lambda one: one.seconds / one.shapes.batch_size**2)  # a batch may have been halved
    rows = []
    for one in found:
        peak = ["-", "-"] if one.bytes is None else [amount(one.bytes), _error(one.predicted_bytes, one.bytes)]
        rows.append(
            [
                str(one.shapes.batch_size),
                one.exchange if one.shapes.ranks > 1 else "-",
                str(one.memory),
                amount(one.predicted_bytes),
                *peak,
                duration(one.predicted_seconds),
                duration(one.seconds),
                _error(one.predicted_seconds, one.seconds),
                "fastest" if one is fastest and len(found) > 1 else "",
            ]
        )
    title = "the loss on this machine; its memory without features and their gradients"
    print_table(title, _HEADER, rows, left=("exchange", "memory", "remark"))


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
