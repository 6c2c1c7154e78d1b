"""Audit installed libraries and circulating recipes, and write docs/findings.md and a table of ours.

No environment has all libraries, so each call audits some of them, and keeps the figures of the others:

    .venv-ecosystem/bin/python benchmarks/audit_peers.py recipes nvidia wholebatch
    .venv-ecosystem/bin/python benchmarks/audit_peers.py sentence_transformers transformers pml lightning
    .venv-vision/bin/python benchmarks/audit_peers.py open_clip lightly
    .venv-embedders/bin/python benchmarks/audit_peers.py flag_embedding ms_swift
    .venv-late/bin/python benchmarks/audit_peers.py pylate colpali

Three are not on the package index; checkouts of luyug/GradCache, texttron/tevatron and deepinsight/insightface:

    export WHOLEBATCH_GRAD_CACHE=folder WHOLEBATCH_TEVATRON=folder WHOLEBATCH_INSIGHTFACE=recognition/arcface_torch
    .venv-ecosystem/bin/python benchmarks/audit_peers.py grad_cache tevatron insightface

Writes the figures to results/audit.json; docs/findings.md, by `findings.py`; and between the marks in
docs/audit_libraries.md the recipes and the settings with losses of this library.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("tests/ecosystem", "tests", "benchmarks", "src")]

import checkouts  # noqa: E402
import findings  # noqa: E402

import wholebatch as wb  # noqa: E402
from wholebatch.auditing import presets  # noqa: E402
from wholebatch.auditing.problem import Problem  # noqa: E402
from wholebatch.auditing.report import Report, Summary, markdown, summarize  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402
from wholebatch.testing import preload  # noqa: E402

TITLES = {
    "recipes": "recipes for CLIP's loss",
    "nvidia": "NeMo Automodel, Megatron-LM (written out from source)",
    "wholebatch": "wholebatch",
}
NAMES = [name for name in presets.PACKAGES if name != "wholebatch"] + [
    *checkouts.NAMES,
    "wholebatch",
]  # as in the table
FIELDS = ("setting", "encoders", "scalars", "causes", "exact")


def settings(name: str) -> Mapping[str, Callable[[], Problem]]:
    """Return the problems by setting: a preset's, or those of tests/ecosystem."""
    if name not in checkouts.NAMES:
        return presets.settings(name)
    checkouts.folder(name)
    found: Mapping[str, Callable[[], Problem]] = importlib.import_module(f"{name}_audits").SETTINGS
    return found


def library(name: str) -> str:
    """Return a library's name with its version, or with the commit of its checkout."""
    if name in checkouts.NAMES:
        return f"{checkouts.NAMES[name]}, {checkouts.commit(name)}"
    versions = " ".join(f"{package} {of}" for package, of in presets.versions(name).items())
    return versions or TITLES[name]


def row(name: str, report: Report) -> dict[str, Any]:
    return {
        "preset": name,
        "library": library(name),
        **vars(summarize(report)),
        "notes": [finding.cause.name for finding in report.findings if not finding.cause.wrong],
        "figures": [of for of in report.to_dict()["rows"] if of["kind"] == "parameters"],
    }


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; none: the pages are written again")
    warnings.simplefilter("ignore")
    names = parser.parse_args().names
    preload(*(presets.module_name(name) for name in names if name not in checkouts.NAMES))
    for name in names:
        rows = []
        for setting, problem in settings(name).items():
            rows.append(row(name, wb.audit(problem, (1, 2, 3), name=setting)))
            print(rows[-1]["library"], *(rows[-1][field] for field in FIELDS), sep=" | ", flush=True)
        keep(findings.RESULTS, rows, ["preset"])
    kept = json.loads(findings.RESULTS.read_text())
    others = findings.theirs(kept)
    kept = [of for of in kept if of not in others or of["preset"] == "recipes"]
    kept.sort(key=lambda of: NAMES.index(of["preset"]))
    table = [(of["library"], Summary(**{field: of[field] for field in FIELDS})) for of in kept]
    fill(ROOT / "docs" / "audit_libraries.md", markdown(table))
    findings.PAGE.write_text(findings.page())


if __name__ == "__main__":
    main()
