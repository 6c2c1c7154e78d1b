"""Print the tables of `wholebatch audit`, with causes and fixes below them."""

from __future__ import annotations

from collections.abc import Sequence

from .._cli.display import print_table, print_text
from .report import LEFT, Report, explanations, headline, table
from .summary import Summary


def print_report(report: Report) -> None:
    """Print every comparison of one problem."""
    header, *lines = table(report)
    starts = [i for i, row in enumerate(report.rows) if i and row.counts != report.rows[i - 1].counts]
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
    starts = [i for i, library in enumerate(libraries) if library not in libraries[:i]]
    print_table(
        "",
        HEADER,
        [(summary.setting, summary.encoders, summary.scalars, summary.causes) for _, summary in summaries],
        left=HEADER,
        styles=["green" if summary.exact else "red" for _, summary in summaries],
        headings={i: libraries[i] for i in starts},
    )
    print_text("W: number of ranks; 1/W: the gradient is too small by that factor")


HEADER = ("setting", "encoders", "temperature", "cause")
