"""Train with pytorch-metric-learning's and lightly's losses and with ours of the same names, on one process and on two.

    make peers
    .venv-peers/bin/python benchmarks/integrations_metric_learning.py          # two minutes on two cores

It prints two tables. Distances: how far the weights of two processes end from those of one process with their loss of
the whole batch, after 20 steps of SGD in float64, relative to the distance that the latter have moved. Steps: time and
memory of one forward and backward pass of a loss on two processes, float32, 128 features, one thread each; the shortest
of three times, and the rise of the peak of a process's memory.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]

import lightly_runs  # noqa: E402
import metric_runs  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from dual import distance  # noqa: E402

from wholebatch._measure import peak, reset_peak  # noqa: E402
from wholebatch.bench.records import about  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_metric_learning.json"
STEPS = {  # rows of each process
    "SupConLoss": 1024,
    "MultiSimilarityLoss": 1024,
    "CircleLoss": 1024,
    "NTXentLoss": 192,
    "lightly.NTXentLoss": 1024,
    "lightly.DCLLoss": 1024,
}
FEATURES = 128


def main() -> None:
    warnings.simplefilter("ignore")
    rows = of_metric_learning() | of_lightly()
    for name, row in rows.items():
        print(name, *(f"{how} {text}" for how, text in row.items()), sep=" | ")
    steps = {name: {how: step_of(how, name) for how in ("theirs", "ours")} for name in STEPS}
    for name, row in steps.items():
        text = [f"{how} {of['step_ms']:.0f} ms, {of['peak_mb']:.0f} MB" for how, of in row.items()]
        print(name, f"{2 * STEPS[name]} rows", *text, sep=" | ")
    versions = {name: version(name) for name in ("pytorch-metric-learning", "lightly")}
    record = {"about": about(), "versions": versions, "distances": rows, "steps": steps}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def of_metric_learning() -> dict[str, dict[str, str]]:
    cases, kinds = metric_runs.CASES, ("theirs", "wrapped", "efficient", "ours")
    true = metric_runs.run_cases("theirs", cases, 1)
    found = metric_runs.on_two(dict.fromkeys(kinds, cases))[0]
    return {name: {how: shown(found[how][name], true[name]) for how in kinds} for name in cases}


def of_lightly() -> dict[str, dict[str, str]]:
    cases, loop = lightly_runs.CASES, lightly_runs.in_a_loop
    true = lightly_runs.run_cases(loop, "theirs", cases, 1)
    kinds = {"theirs": cases, "gathered": {name: case for name, case in cases.items() if name != "KoLeoLoss"}}
    found = lightly_runs.on_two([(loop, how, of) for how, of in (kinds | {"ours": cases}).items()])[0]
    return {
        f"lightly.{name}": {
            how: shown(found[loop.__name__, how].get(name, "no such argument"), true[name])
            for how in ("theirs", "gathered", "ours")
        }
        for name in cases
    }


def shown(run: Any, true: Any) -> str:
    return run if isinstance(run, str) else f"{distance(run, true):.2g}"


def step_of(how: str, name: str) -> dict[str, float]:
    found = run_ranks(step, 2, how, name, timeout_s=300)
    return {"step_ms": max(of["step_ms"] for of in found), "peak_mb": max(of["peak_mb"] for of in found)}


def step(how: str, name: str) -> dict[str, float]:
    torch.set_num_threads(1)
    rows, rank = STEPS[name], dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    x, y = torch.randn(2, rows, FEATURES, generator=generator)
    if name.startswith("lightly."):
        case = lightly_runs.Case(name.removeprefix("lightly."))
        loss, second = lightly_runs.loss_of("ours" if how == "ours" else "gathered", case).float(), y
    else:
        case = metric_runs.Case(name, ours=True)
        loss, _ = metric_runs.loss_and_miner("ours" if how == "ours" else "wrapped", case)
        second = (rank * rows + torch.arange(rows)) // (2 if name == "NTXentLoss" else 4)

    def one(count: int) -> float:
        first = x[:count].clone().requires_grad_()
        dist.barrier()
        start = time.perf_counter()
        loss(first, second[:count].clone()).backward()
        dist.barrier()
        return time.perf_counter() - start

    one(16)
    before = reset_peak()
    step_ms = 1e3 * min(one(rows) for _ in range(3))
    return {"step_ms": step_ms, "peak_mb": (peak() - before) / 2**20}


if __name__ == "__main__":
    main()
