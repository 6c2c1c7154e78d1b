"""Audit installed libraries and circulating recipes by the presets, and write the table of docs/audit.md.

Run in the environment that `make peers` makes. Writes the figures to results/, and the table between the marks in
docs/audit.md.

    PYTHONPATH=src .venv-peers/bin/python benchmarks/audit_peers.py
"""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import wholebatch as wb
from wholebatch.auditing import presets
from wholebatch.auditing.report import Report
from wholebatch.auditing.summary import markdown, summarize
from wholebatch.bench.records import about
from wholebatch.testing import preload

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "audit.json"
TITLES = {"recipes": "recipes for CLIP's loss", "wholebatch": "wholebatch"}


def library(name: str) -> str:
    versions = " ".join(f"{package} {of}" for package, of in presets.versions(name).items())
    return versions or TITLES[name]


def figures(report: Report) -> list[dict[str, Any]]:
    return [row for row in report.to_dict()["rows"] if row["kind"] == "parameters"]


def fill(file: Path, table: str) -> None:
    """Put the table between the file's marks."""
    text = file.read_text()
    filled, count = re.subn(
        r"(<!-- audit: .*?-->\n).*?(<!-- end -->)",
        lambda found: found[1] + table + "\n" + found[2],
        text,
        flags=re.DOTALL,
    )
    assert count == 1, f"{file} has {count} places for the table"
    file.write_text(filled)


def main() -> None:
    warnings.simplefilter("ignore")
    names = presets.installed()
    assert set(names) == set(presets.PACKAGES), f"only these are installed: {names}: make peers"
    preload(*(presets.module_name(name) for name in names))
    found: list[tuple[str, Report]] = []
    for name in names:
        for setting, problem in presets.settings(name).items():
            report = wb.audit(problem, (1, 2, 3), name=setting)
            found.append((library(name), report))
            print(f"{library(name)}: {summarize(report)}", flush=True)
    kept = [
        {
            "library": of,
            **vars(summarize(report)),
            "notes": [finding.cause.name for finding in report.findings if not finding.cause.wrong],
            "figures": figures(report),
        }
        for of, report in found
    ]
    RESULTS.write_text(json.dumps({"about": about(), "settings": kept}, indent=1) + "\n")
    full = [(of, summarize(report)) for of, report in found]
    fill(ROOT / "docs" / "audit.md", markdown(full))


if __name__ == "__main__":
    main()
