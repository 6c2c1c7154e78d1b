"""The planner's memory of late interaction against measurements.

    .venv/bin/python benchmarks/plan_late_interaction.py

Memory is the rise of a process's peak in a second step, without features and their gradients. Results go to
results/plan_late_interaction.json, and the table to docs/planning.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from wholebatch._launch.processes import run_processes
from wholebatch.bench.records import keep
from wholebatch.planning.check import rise_of_a_step
from wholebatch.planning.counted import work_of
from wholebatch.planning.shapes import ExchangeUsed, TokenShapes

HERE = Path(__file__).resolve().parent
RESULTS, PAGE = HERE / "results" / "plan_late_interaction.json", HERE.parent / "docs" / "planning.md"
MARK = "<!-- tokens -->"


class Setting(NamedTuple):
    """A step, and how it is computed."""

    ranks: int
    batch: int
    query_tokens: int
    document_tokens: int
    embedding_size: int = 128
    documents_per_query: int = 1
    dtype: str = "float32"
    exchange: ExchangeUsed = "gather"
    kept: float = 0.0  # the part of the winners that is kept

    @property
    def label(self) -> str:
        """The settings as text."""
        documents = "" if self.documents_per_query == 1 else f", {self.documents_per_query} documents a query"
        kept = "winners kept" if self.kept == 1 else f"{self.kept:.0%} of winners kept" if self.kept else "flat"
        parts = [f"B = {self.batch}, {self.query_tokens} x {self.document_tokens} tokens{documents}"]
        parts += [f"d = {self.embedding_size}", *([self.exchange] if self.ranks > 1 else []), kept]
        return ", ".join([*parts, *([self.dtype] if self.dtype != "float32" else [])])


SETTINGS = (
    Setting(1, 128, 32, 180),
    Setting(1, 128, 32, 180, kept=1.0),
    Setting(1, 300, 16, 48, 64, kept=0.5),
    Setting(1, 40, 20, 700),
    Setting(1, 96, 120, 24),
    Setting(1, 48, 32, 90, documents_per_query=3, dtype="bfloat16"),
    Setting(2, 128, 32, 180),
    Setting(2, 128, 32, 180, kept=1.0),
    Setting(2, 128, 32, 180, exchange="ring"),
    Setting(2, 96, 120, 24, exchange="ring", kept=1.0),
    Setting(2, 48, 32, 90, documents_per_query=3, dtype="bfloat16"),
)


def measure(of: Setting) -> dict[str, Any]:
    """Return predicted and measured megabytes of a setting."""
    shapes = TokenShapes(
        "max_sim", of.batch, of.embedding_size, of.ranks, getattr(torch, of.dtype), query_tokens=of.query_tokens,
        document_tokens=of.document_tokens, documents_per_query=of.documents_per_query,
    )  # fmt: skip
    memory = shapes.memory_for(0) + int(of.kept * shapes.bytes_of_all_winners) if of.kept else "flat"
    predicted = work_of(shapes, of.exchange, memory).loss
    measured = run_processes(rise_of_a_step, of.ranks, shapes, of.exchange, memory, timeout_s=1e3)[0]
    assert measured is not None
    return {
        "ranks": of.ranks,
        "setting": of.label,
        "predicted_mb": round(predicted / 1e6, 2),
        "measured_mb": round(measured / 1e6, 2),
        "error_of_memory": round(predicted / measured - 1, 4),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the documentation."""
    lines = ["| ranks | late interaction | memory | measured | error |", "|--:|---|--:|--:|--:|"]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['setting']} | {row['predicted_mb']:.1f} MB | {row['measured_mb']:.1f} MB | "
            f"{row['error_of_memory']:+.1%} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Predict, measure, print and keep."""
    rows = []
    for setting in SETTINGS:
        rows.append(measure(setting))
        print(rows[-1], flush=True)
    keep(RESULTS, rows, ("ranks", "setting"))
    before, _, after = PAGE.read_text().split(MARK)
    PAGE.write_text(f"{before}{MARK}\n\n{table(rows)}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()
