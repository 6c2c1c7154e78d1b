"""Train by ms-swift's `swift sft` on two processes, with its loss and with ours: weights, time and memory of a step.

    make embedders
    .venv-embedders/bin/python benchmarks/integrations_ms_swift.py   # three minutes on two cores

Weights: how far two processes end from one with ms-swift's loss of the whole batch, after 20 steps of SGD in float64,
relative to the distance that the latter has moved. Steps: 2048 queries in all, each with a positive and two negatives,
a tiny Qwen3, float32, one thread each; the median of the steps after the first, and the rise of the peak of rank 0's
memory. The losses take turns in one run. Halves: one call of each loss in bfloat16, against float64.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]

import ms_swift_runs  # noqa: E402
import torch  # noqa: E402
from dual import as_launched, distance, free_port  # noqa: E402
from ms_swift_runs import Case  # noqa: E402

from wholebatch._measure import peak, reset_peak  # noqa: E402
from wholebatch.bench.records import about  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_ms_swift.json"
ROWS, STEPS, ROUNDS, MB = 2048, 6, 2, 2**20
OWN = {"INFONCE_USE_BATCH": "False"}
QWEN3 = {"INFONCE_MASK_FAKE_NEGATIVE": "True", "INFONCE_INCLUDE_QQ": "True", "INFONCE_INCLUDE_DD": "True"}
CASES = {
    "infonce": Case(),
    "as Qwen3-Embedding": Case(variables=QWEN3),
    "numbers of negatives that differ": Case(negatives="uneven"),
    "own negatives": Case(variables=OWN, negatives="uneven"),
    "first negative": Case(variables={"INFONCE_HARD_NEGATIVES": "1"}),
    "matryoshka": Case(("--mrl_dims", '{"16": 1.0, "8": 0.5}')),
    "two micro-steps": Case(micro_steps=2),
    "two micro-steps, ModernBERT": Case(micro_steps=2, model="bert"),
}
STEPPED = ("infonce", "as Qwen3-Embedding")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ms_swift_runs.make_files(folder)
        distances = weights(folder)
        for case, row in distances.items():
            print(case, *(f"{whose} {away:.1e}" for whose, away in row.items()), sep=" | ", flush=True)
        ms_swift_runs.make_files(folder, rows=ROWS * STEPS)
        steps = run_ranks(_steps, 2, free_port(), str(folder), timeout_s=900)[0]
        for case, row in steps.items():
            text = [f"{whose} {of['step_ms']:.0f} ms, {of['peak_mb']:.0f} MB" for whose, of in row.items()]
            print(case, f"{ROWS} queries", *text, sep=" | ")
    halves = in_bfloat16()
    print("error in bfloat16", halves)
    versions = {name: version(name) for name in ("ms-swift", "transformers", "accelerate")}
    record = {"about": about(), "versions": versions, "distances": distances, "steps": steps, "bfloat16": halves}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def weights(folder: Path) -> dict[str, dict[str, float]]:
    """Return how far two processes end from one, by case and loss."""
    truths = [ms_swift_runs.truth(case) for case in CASES.values()]
    one = ms_swift_runs.run(folder, truths, 1)
    two = ms_swift_runs.run(folder, [*CASES.values(), *truths], 2)
    found = {}
    for (name, case), truth in zip(CASES.items(), truths, strict=True):
        expected = one[repr(truth)]
        found[name] = {
            "theirs": distance(two[repr(truth)], expected),
            "ours": distance(two[repr(case)], expected),
        }
    return found


def _steps(port: int, folder: str) -> dict[str, dict[str, dict[str, float]]]:
    from swift.trainers import EmbeddingTrainer

    as_launched(port)
    os.environ["HF_HUB_OFFLINE"] = "1"
    ms_swift_runs.ROWS, ms_swift_runs.STEPS = ROWS, STEPS
    times: list[float] = []
    rises: list[float] = []
    original = EmbeddingTrainer.training_step

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = reset_peak()
        start = time.perf_counter()
        found = original(self, *args, **kwargs)
        times.append(time.perf_counter() - start)
        rises.append(peak() - before)
        return found

    EmbeddingTrainer.training_step = timed
    found: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in STEPPED}
    taken: dict[tuple[str, str], list[float]] = {}
    for turn in range(ROUNDS):
        for name in STEPPED:
            for whose in ("theirs", "ours"):
                times.clear()
                rises.clear()
                case = CASES[name] if whose == "ours" else ms_swift_runs.truth(CASES[name])
                ms_swift_runs.train(folder, case, 2, f"{folder}/steps {turn} {name} {whose}", double=False)
                taken.setdefault((name, whose), []).extend(times[1:])
                found[name][whose] = {
                    "step_ms": 1000 * median(taken[name, whose]),
                    "peak_mb": median(rises[1:]) / MB,
                }
    return found


def in_bfloat16() -> dict[str, float]:
    """Return the relative error of each loss's gradient in one process, for 512 queries in bfloat16."""
    from swift.loss.embedding import InfonceLoss

    from wholebatch.integrations import ms_swift

    torch.manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(512 * 3, 64, dtype=torch.float64), dim=1).bfloat16()
    labels = torch.tensor([1.0, 0.0]).repeat(512)

    def gradient(loss: Any, features: torch.Tensor) -> torch.Tensor:
        features = features.clone().requires_grad_()
        loss(None, object())({"last_hidden_state": features}, labels).backward()
        assert features.grad is not None
        return features.grad.double()

    truth = gradient(InfonceLoss, x.double())
    return {
        whose: ((gradient(loss, x) - truth).norm() / truth.norm()).item()
        for whose, loss in (("theirs", InfonceLoss), ("ours", ms_swift.InfonceLoss))
    }


if __name__ == "__main__":
    main()
