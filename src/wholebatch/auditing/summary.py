"""A report in a line: the gradient of encoders and of the temperature, and causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .causes import HANGS, RAISES
from .compare import number
from .report import Report, Row


@dataclass(frozen=True)
class Summary:
    """The summary of one report.

    Args:
        setting: the problem's name.
        encoders: the verdict on groups of many parameters; "-" if there are none.
        scalars: the verdict on groups of one number: temperatures, biases.
        causes: names of causes of wrong gradients; "" if there are none.
        exact: whether all gradients are right.
    """

    setting: str
    encoders: str
    scalars: str
    causes: str
    exact: bool


def summarize(report: Report) -> Summary:
    """Return one line for all numbers of ranks."""
    of_parameters = [row for row in report.rows if row.kind == "parameters"]
    scalars = [row for row in of_parameters if row.scalar]
    encoders = [row for row in of_parameters if not row.scalar]
    if {RAISES.name, HANGS.name} & {*report.causes} and all(len(row.counts) == 1 for row in of_parameters):
        scalars = encoders = []  # several ranks have no gradient that could be compared
    return Summary(report.problem, _verdict(encoders), _verdict(scalars), ", ".join(report.causes), report.exact)


def markdown(summaries: Sequence[tuple[str, Summary]]) -> str:
    """Return a Markdown table of libraries and their settings."""
    lines = ["| | encoders | temperature | cause |", "|---|---|---|---|"]
    library = None
    for name, summary in summaries:
        if name != library:
            lines.append(f"| **{name}** | | | |")
            library = name
        cells = (summary.setting, summary.encoders, summary.scalars, summary.causes)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _verdict(rows: Sequence[Row]) -> str:
    """Return the verdict for all splits: exact; 1/W; x W; x 2; wrong direction."""
    if not rows:
        return "-"
    wrong = [row for row in rows if not row.exact]
    if not wrong:
        return "exact"
    if all(row.verdict.startswith("x ") for row in wrong):
        ratios = [(len(row.counts), row.comparison.ratio) for row in wrong]
        for words, factor in (("1/W", lambda w: 1 / w), ("x W", lambda w: w)):
            if all(w > 1 and abs(ratio / factor(w) - 1) < 1e-3 for w, ratio in ratios):
                return words
        return ", ".join(dict.fromkeys(f"x {number(ratio)}" for _, ratio in ratios))
    if all(row.verdict == "no gradient" for row in wrong):
        return "no gradient"
    cosines = sorted(row.comparison.cosine for row in wrong if row.comparison.cosine == row.comparison.cosine)
    digits = 2 if cosines and cosines[0] < 0.995 else 6
    return f"wrong direction, cosine from {cosines[0]:.{digits}f}" if cosines else "wrong"
