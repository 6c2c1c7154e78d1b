"""The outcome of an audit: comparisons, causes and notes, as text, as JSON, and in a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .._cli.text_table import format_rows
from .causes import HANGS, RAISES, Cause
from .compare import Comparison, number

_HEADER = ("ranks", "rows", "gradient of", "ratio", "cosine", "error", "verdict")
SUMMARY_HEADER = ("setting", "encoders", "temperature", "cause")
LEFT = ("rows", "gradient of", "verdict")  # columns of text


@dataclass(frozen=True)
class Row:
    """The comparison of one group of parameters, or one input, on one split of the batch.

    Args:
        counts: rows of each rank.
        kind: "parameters" or "input".
        name: of the group or the input.
        comparison: with the gradient of one process.
        verdict: "exact", "x 0.5", "wrong direction", "no gradient", "should be 0".
        scalar: whether it is one number: a temperature, a bias.
    """

    counts: tuple[int, ...]
    kind: str
    name: str
    comparison: Comparison
    verdict: str
    scalar: bool = False

    @property
    def exact(self) -> bool:
        """Return whether the gradient is right."""
        return self.verdict == "exact"


@dataclass(frozen=True)
class Finding:
    """A cause, where it was found, and the evidence."""

    cause: Cause
    counts: tuple[int, ...]
    groups: tuple[str, ...]
    evidence: str


@dataclass(frozen=True)
class Report:
    """The outcome of :func:`wholebatch.audit`.

    Args:
        problem: the problem's name.
        rows: every comparison.
        findings: causes, wrong ones first, each once.
        notes: on how the audit was done.
        values: for each split, the loss of each rank.
        dtype: precision of the computation.
        tolerance: of relative errors, for "exact".
        seconds: the audit took.
        versions: of packages.
    """

    problem: str
    rows: tuple[Row, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    values: Mapping[tuple[int, ...], tuple[float, ...]]
    dtype: str
    tolerance: float
    seconds: float
    versions: Mapping[str, str]

    @property
    def exact(self) -> bool:
        """Return whether every gradient is that of one process on the whole batch."""
        return all(row.exact for row in self.rows) and not any(finding.cause.wrong for finding in self.findings)

    @property
    def causes(self) -> tuple[str, ...]:
        """Return the names of the causes of wrong gradients."""
        return tuple(dict.fromkeys(finding.cause.name for finding in self.findings if finding.cause.wrong))

    def row(self, name: str, counts: tuple[int, ...]) -> Row:
        """Return the row of a group or input on a split."""
        return next(row for row in self.rows if row.name == name and row.counts == counts)

    def to_dict(self) -> dict[str, Any]:  # values as JSON has them
        """Return the report as JSON has it."""
        return {
            "problem": self.problem,
            "exact": self.exact,
            "causes": list(self.causes),
            "findings": [
                {
                    "cause": finding.cause.name,
                    "wrong": finding.cause.wrong,
                    "counts": list(finding.counts),
                    "groups": list(finding.groups),
                    "title": finding.cause.title,
                    "evidence": finding.evidence,
                    "fix": finding.cause.fix,
                }
                for finding in self.findings
            ],
            "rows": [
                {
                    "counts": list(row.counts),
                    "kind": row.kind,
                    "name": row.name,
                    "ratio": _finite_or_none(row.comparison.ratio),
                    "cosine": _finite_or_none(row.comparison.cosine),
                    "relative_error": _finite_or_none(row.comparison.error),
                    "verdict": row.verdict,
                }
                for row in self.rows
            ],
            "losses": [{"counts": list(counts), "of_ranks": list(losses)} for counts, losses in self.values.items()],
            "notes": list(self.notes),
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "seconds": round(self.seconds, 3),
            "versions": dict(self.versions),
        }

    def __str__(self) -> str:
        header, *rows = table(self)
        lines = [line for lines in format_rows(header, rows, left=LEFT) for line in lines]
        return "\n".join([f"audit of {self.problem}: {headline(self)}", "", *lines, *explanations(self)])


def headline(report: Report) -> str:
    """Return the verdict in a line."""
    if report.exact:
        return "every gradient is that of one process on the whole batch"
    wrong = sum(not row.exact for row in report.rows)
    named = ", ".join(report.causes) or "no cause named"
    if not wrong:
        return f"WRONG ({named})"
    return f"WRONG ({named}): {wrong} of {len(report.rows)} gradients are not those of one process on the whole batch"


def table(report: Report) -> list[list[str]]:
    """Return header and rows as text."""
    lines = [list(_HEADER)]
    for row in report.rows:
        compared = row.comparison
        lines.append(
            [
                str(len(row.counts)),
                " + ".join(map(str, row.counts)),
                row.name if row.kind == "parameters" else f"input {row.name}",
                *("" if math.isnan(x) else number(x) for x in (compared.ratio, compared.cosine)),
                f"{compared.error:.1e}",
                row.verdict,
            ]
        )
    return lines


def explanations(report: Report) -> list[str]:
    """Return causes with evidence and fix, and notes, as lines."""
    lines = []
    for finding in report.findings:
        where = f"{len(finding.counts)} rank{'s' * (len(finding.counts) > 1)} ({' + '.join(map(str, finding.counts))})"
        groups = f", {', '.join(finding.groups)}" if finding.groups else ""
        lines += ["", f"{finding.cause.name}: {finding.cause.title}", f"  seen on {where}{groups}: {finding.evidence}"]
        lines += [f"  fix: {finding.cause.fix}"] if finding.cause.wrong else [f"  {finding.cause.fix}"]
    if report.notes:
        lines += ["", *(f"note: {note}" for note in report.notes)]
    return lines


def _finite_or_none(x: float) -> float | None:
    return x if math.isfinite(x) else None


@dataclass(frozen=True)
class Summary:
    """The summary of one report."""

    setting: str  # the problem's name
    encoders: str  # the verdict on groups of many parameters; "-" if there are none
    scalars: str  # the verdict on groups of one number: temperatures, biases
    causes: str  # names of causes of wrong gradients; "" if there are none
    exact: bool  # whether all gradients are right

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the entries of a table's line."""
        return self.setting, self.encoders, self.scalars, self.causes


def summarize(report: Report) -> Summary:
    """Return one line for all numbers of ranks."""
    parameter_rows = [row for row in report.rows if row.kind == "parameters"]
    scalars = [row for row in parameter_rows if row.scalar]
    encoders = [row for row in parameter_rows if not row.scalar]
    if {RAISES.name, HANGS.name} & {*report.causes} and all(len(row.counts) == 1 for row in parameter_rows):
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
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in summary.cells) + " |")
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
