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


def print_measured(measured: Sequence[Measured]) -> None:
    """Print predictions, measurements and errors, and mark the fastest option."""
    fastest = min(measured, key=lambda m: m.seconds / m.shapes.batch_size**2)  # a batch may have been halved
    rows = []
    for m in measured:
        peak = ["-", "-"] if m.bytes is None else [amount(m.bytes), _error(m.predicted_bytes, m.bytes)]
        rows.append(
            [
                str(m.shapes.batch_size),
                m.exchange if m.shapes.ranks > 1 else "-",
                str(m.memory),
                amount(m.predicted_bytes),
                *peak,
                duration(m.predicted_seconds),
                duration(m.seconds),
                _error(m.predicted_seconds, m.seconds),
                "fastest" if m is fastest and len(measured) > 1 else "",
            ]
        )
    title = "the loss on this machine; its memory without features and their gradients"
    print_table(title, _HEADER, rows, left=("exchange", "memory", "remark"))


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
