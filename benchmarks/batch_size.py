"""The effect of a larger global batch: the training application with an equal number of samples, in two comparisons.

Usage: python benchmarks/batch_size.py [--samples 307200] [--seeds 0 1] [--jobs 2]

"batch": global batches of 64, 256 and 1024. A smaller batch also means more optimizer steps. The learning rate is
scaled by sqrt(batch / 1024) ("sqrt") or left ("same"); the warm-up sees the same number of samples.

"negatives": 1024 pairs in every step, so the same steps, but the loss is the mean of the losses of groups of 64 or 256
pairs: the loss of 16 or 4 processes that do not see each other's features.

Each job uses one thread. Adds a line per run to benchmarks/results/batch_size.jsonl and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results" / "batch_size.jsonl"
BATCH, RATE, WARMUP = 1024, 2e-3, 20  # the application's defaults

# (batch size, pairs that share a loss, rule of the learning rate)
RUNS = [(64, 64, "sqrt"), (64, 64, "same"), (256, 256, "sqrt"), (256, 256, "same"), (1024, 1024, "same"),
        (1024, 64, "same"), (1024, 256, "same")]  # fmt: skip

# A run whose loss sees only groups of the batch is started through this program instead of `-m wholebatch`.
GROUPED = """
import sys
import torch
import wholebatch as wb
from wholebatch.__main__ import main
from wholebatch_train.tasks import retrieve

group = int(sys.argv[1])

class Grouped(torch.nn.Module):
    def forward(self, images, texts, scale, bias, names):
        pairs = zip(images.split(group), texts.split(group), strict=True)
        return torch.stack([wb.functional.clip_loss(x, y, scale) for x, y in pairs]).mean()

retrieve.make_objective = lambda config, texts, **_: Grouped()
sys.exit(main(sys.argv[2:]))
"""


def main() -> None:
    """Run every combination, then print their means over the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300 * BATCH, help="pairs seen in each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one run of each kind per seed")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("")
    kinds = [(*kind, seed) for seed in options.seeds for kind in RUNS]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda kind: run(*kind, samples=options.samples), kinds))
    print_table(rows)


def run(batch: int, group: int, rule: str, seed: int, *, samples: int) -> dict[str, Any]:
    """Run one training, and return its report."""
    steps = samples // batch
    rate = RATE * (batch / BATCH) ** (0.5 if rule == "sqrt" else 0)
    start = ["-m", "wholebatch"] if group == batch else ["-c", GROUPED, str(group)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "run-folder": f"{folder}/run", "batch-size": batch, "steps": steps, "learning-rate": rate,
            "warmup-steps": WARMUP * BATCH // batch, "seed": seed, "validate-every": steps, "checkpoint-every": steps,
        }  # fmt: skip
        command = [sys.executable, *start, "train"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    row = {
        "batch_size": batch, "pairs_per_loss": group, "rule": rule, "seed": seed, "samples": samples, "steps": steps,
        "learning_rate": round(rate, 6), "image_to_text": report["image_to_text"],
        "text_to_image": report["text_to_image"], "torch": torch_version(), "machine": platform.machine(),
        "commit": commit(),
    }  # fmt: skip
    with RESULTS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"batch {batch}, {group} pairs per loss, {rule}, seed {seed}: {report['image_to_text']}", flush=True)
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """Print means over the seeds in Markdown."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["batch_size"], row["pairs_per_loss"], row["learning_rate"], row["steps"]].append(row)
    print("\n| batch | pairs per loss | learning rate | steps | recall@1 | recall@5 | recall@10 |\n" + "|---" * 7 + "|")
    for key, members in groups.items():
        recalls = (mean(m["image_to_text"][f"recall@{k}"] for m in members) for k in (1, 5, 10))
        print("| " + " | ".join([*map(str, key), *(f"{value:.3f}" for value in recalls)]) + " |")


def torch_version() -> str:
    """Return the version of torch that the runs use."""
    import torch

    return torch.__version__


def commit() -> str:
    """Return the commit of the checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


if __name__ == "__main__":
    main()
