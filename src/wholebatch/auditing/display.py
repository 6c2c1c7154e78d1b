"""Print the tables of `wholebatch audit`, with causes and fixes below them."""

from __future__ import annotations

from collections.abc import Sequence

from .._cli.display import print_table, print_text
from .report import LEFT, Report, explanations, headline, table
from .summary import Summary


def print_report(report: Report) -> None:
    """Print every comparison of one problem."""
    header, *lines = table(report)
    starts = [at for at, row in enumerate(report.rows) if at and row.counts != report.rows[at - 1].counts]
    print_table(
        f"audit of {report.problem}",
        header,
        lines,
        left=LEFT,
        styles=["green" if row.exact else "red" for row in report.rows],
        headings=dict.fromkeys(starts, ""),
    )
    for line in explanations(report):
        print_text(line)
    print_text("")
    print_text(f"{headline(report)} ({report.dtype}, {report.seconds:.1f} s)", "green" if report.exact else "bold red")


def print_summaries(summaries: Sequence[tuple[str, Summary]]) -> None:
    """Print a line for each setting of each library."""
    libraries = [library for library, _ in summaries]
    starts = [at for at, library in enumerate(libraries) if library not in libraries[:at]]
    print_table(
        "",
        HEADER,
        [(of.setting, of.encoders, of.scalars, of.causes) for _, of in summaries],
        left=HEADER,
        styles=["green" if of.exact else "red" for _, of in summaries],
        headings={at: libraries[at] for at in starts},
    )
    print_text("W: number of ranks; 1/W: the gradient is too small by that factor")


HEADER = ("setting", "encoders", "temperature", "cause")
