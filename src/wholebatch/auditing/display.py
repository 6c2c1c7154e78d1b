"""What `wholebatch audit` shows: tables, and under them causes with what mends them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._display import print_in_full
from .report import Report, explanations, headline, table
from .summary import Summary


def print_report(report: Report) -> None:
    """Every comparison of one problem."""
    lines = table(report)
    header = lines.pop(0)
    shown = Table(title=f"audit of {escape(report.problem)}", title_justify="left")
    for at, name in enumerate(header):
        shown.add_column(name, justify="right" if at in (0, 3, 4, 5) else "left", overflow="fold", no_wrap=at in (0, 6))
    before = None
    for cells, row in zip(lines, report.rows, strict=True):
        if before is not None and before != row.counts:
            shown.add_section()
        before = row.counts
        shown.add_row(*map(escape, cells[:-1]), f"[{'green' if row.exact else 'red'}]{escape(cells[-1])}[/]")
    console = print_in_full(shown, fold=True)
    for line in explanations(report):
        console.print(escape(line), highlight=False, soft_wrap=True)
    verdict = "green" if report.exact else "bold red"
    console.print(
        f"\n[{verdict}]{escape(headline(report))}[/] ({report.dtype}, {report.seconds:.1f} s)",
        highlight=False,
        soft_wrap=True,
    )


def print_summaries(summaries: Sequence[tuple[str, Summary]]) -> None:
    """A line for each setting of each library."""
    console = Console()
    shown = Table()
    for name in ("setting", "encoders", "temperature", "why"):
        shown.add_column(name, overflow="fold")
    library = None
    for of, summary in summaries:
        if of != library:
            shown.add_section()
            shown.add_row(f"[bold]{escape(of)}[/]")
            library = of
        color = "green" if summary.exact else "red"
        cells = (summary.encoders, summary.scalars, summary.causes)
        shown.add_row(f"[{color}]{escape(summary.setting)}[/]", *map(escape, cells))
    console.print(shown)
    console.print("W: number of ranks; 1/W: the gradient is so much of what it should be", highlight=False)
