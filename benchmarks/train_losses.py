"""The training application with each of its losses, for equal time.

    python benchmarks/train_losses.py [NAME ...] [--seconds 60] [--seed 0]

A short run of each loss measures its step; the run itself then has as many steps as fit into --seconds of training,
with the application's defaults for everything else (a cosine over all steps; no rate was tuned for any loss). Runs
follow each other, on all cores. Adds a line per run to results/train_losses.jsonl and prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, get_args

from wholebatch.bench.records import about
from wholebatch_train.config import Loss

RESULTS = Path(__file__).parent / "results" / "train_losses.jsonl"
PROBE = 20


def run(name: str, steps: int, seed: int, folder: Path) -> list[dict[str, Any]]:
    """Run one training, and return its metrics."""
    options = ["--loss", name, "--steps", steps, "--seed", seed, "--validate-every", steps, "--checkpoint-every", steps]
    command = [sys.executable, "-m", "wholebatch", "train", *map(str, options), "--run-folder", str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Run every loss, then print the recall for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(get_args(Loss)))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("| loss | ms per step | steps | seconds | recall@1 | recall@5 | recall@10 | name -> image, recall@1 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            probe = run(name, PROBE, arguments.seed, Path(folder) / "probe")
            each = (probe[-2]["seconds"] - probe[4]["seconds"]) / (PROBE - 6)
            steps = round(arguments.seconds / each)
            metrics = run(name, steps, arguments.seed, Path(folder) / "run")
            report = json.loads((Path(folder) / "run" / "report.json").read_text())
        row = {
            "loss": name,
            "seed": arguments.seed,
            "steps": steps,
            "seconds": metrics[-1]["seconds"],
            "image_to_text": report["image_to_text"],
            "text_to_image": report["text_to_image"],
            **about(),
        }
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
        found = [report["image_to_text"][f"recall@{k}"] for k in (1, 5, 10)] + [report["text_to_image"]["recall@1"]]
        figures = " | ".join(f"{recall:.3f}" for recall in found)
        print(f"| {name} | {1e3 * each:.0f} | {steps} | {row['seconds']:.0f} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
