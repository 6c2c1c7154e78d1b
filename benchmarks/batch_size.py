"""Does a larger global batch help? The training application at 64, 256 and 1024, with equal samples seen.

    python benchmarks/batch_size.py [--samples 307200] [--seeds 0 1]

The learning rate and the warm-up follow two rules, each for all batch sizes: "sqrt" scales the default rate by
sqrt(batch / 1024), "same" leaves it; the warm-up always sees the same number of samples. Writes a line per run to
benchmarks/results/batch_size.jsonl and prints a table.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "batch_size.jsonl"
DEFAULT_BATCH, DEFAULT_RATE, DEFAULT_WARMUP = 1024, 2e-3, 20


def main() -> None:
    """Run every combination, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=300 * DEFAULT_BATCH, help="pairs seen in each run")
    parser.add_argument("--batches", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rules", nargs="+", default=["sqrt", "same"], choices=["sqrt", "same"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    RESULTS.parent.mkdir(exist_ok=True)
    for seed in options.seeds:
        for batch in options.batches:
            for rule in options.rules if batch != DEFAULT_BATCH else ["same"]:
                row = run(batch, rule, seed, options.samples)
                print(json.dumps(row), flush=True)
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def run(batch: int, rule: str, seed: int, samples: int) -> dict[str, object]:
    """One training run, and its report."""
    steps = samples // batch
    rate = DEFAULT_RATE * (batch / DEFAULT_BATCH) ** (0.5 if rule == "sqrt" else 0)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {
            "run-folder": f"{folder}/run", "batch-size": batch, "steps": steps, "learning-rate": rate,
            "warmup-steps": DEFAULT_WARMUP * DEFAULT_BATCH // batch, "seed": seed, "evaluate-every": steps,
            "checkpoint-every": steps,
        }  # fmt: skip
        command = [sys.executable, "-m", "wholebatch", "train"]
        for name, value in arguments.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "run" / "report.json").read_text())
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    import torch

    return {
        "batch_size": batch, "steps": steps, "learning_rate": round(rate, 6), "rule": rule, "seed": seed,
        "image_to_text": report["image_to_text"], "text_to_image": report["text_to_image"],
        "seconds": report["seconds"], "torch": torch.__version__, "threads": torch.get_num_threads(),
        "machine": platform.machine(), "commit": commit,
    }  # fmt: skip


if __name__ == "__main__":
    main()
