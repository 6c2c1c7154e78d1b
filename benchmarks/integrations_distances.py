"""How far two processes end from one, by other trainers with their losses and with ours: the tables of the docs.

    .venv-ecosystem/bin/python benchmarks/integrations_distances.py sentence_transformers transformers

Each run is 20 steps of plain SGD by the framework's own trainer, in float64. One process with a loss of the whole batch
is the truth. Distances are relative to the distance that training has moved the weights. The runs are those of the
tests in tests/ecosystem. Results go to results/integrations_distances.json; integrations_open_clip.py has open_clip's.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from wholebatch._base.third_party import version  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_distances.json"
Distances = dict[tuple[str, str], float]  # by case and method


def sentence_transformers() -> Distances:
    from dual import distance
    from sentence_runs import encoder, on_two, run_cases
    from test_sentence_transformers import CASES, NOT_GATHERING, TABLE

    with tempfile.TemporaryDirectory() as folder:
        for seed in (0, 5):
            encoder(folder, seed)  # written once, before processes read it
        cases = {name: CASES[name] for name in TABLE}
        gathering = {name: case for name, case in cases.items() if name not in NOT_GATHERING}
        true = run_cases("theirs", cases, folder, 1)
        found, _ = on_two({"theirs": cases, "theirs, gathered": gathering, "ours": cases}, folder)
    return {(name, how): distance(run, true[name]) for how, runs in found.items() for name, run in runs.items()}


def transformers() -> Distances:
    from dual import free_port
    from test_transformers import JOBS, body, distance, train

    kinds = {(kind, n) for kind, _, n in JOBS}
    jobs = [*JOBS, *((kind, "plain function", n) for kind, n in kinds)]
    found, _ = run_ranks(partial(body, free_port(), jobs), 2, timeout_s=900)
    true = {(kind, n): train(kind, "dense", 1, n) for kind, n in kinds}
    return {(f"{kind}, {n} micro-steps", form): distance(found[kind, form, n], true[kind, n]) for kind, form, n in jobs}


FRAMEWORKS: dict[str, Callable[[], Distances]] = {
    "sentence_transformers": sentence_transformers,
    "transformers": transformers,
}
PACKAGES = {"sentence_transformers": "sentence-transformers"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=[*FRAMEWORKS])
    warnings.simplefilter("ignore")
    for framework in parser.parse_args().frameworks:
        of = version(PACKAGES.get(framework, framework))
        rows: list[dict[str, Any]] = [
            {"framework": framework, "case": case, "method": method, "distance": distance, "version": of}
            for (case, method), distance in FRAMEWORKS[framework]().items()
        ]
        for row in rows:
            print(f"| {row['case']} | {row['method']} | {row['distance']:.1e} |", flush=True)
        keep(RESULTS, rows, ["framework"])


if __name__ == "__main__":
    main()
