"""The cost of the comparison at the start of a loss's backward pass: a step of CLIP with and without it, on gloo.

Usage: python benchmarks/backward_handshake.py

Forward and backward of `clip_loss` on 2 and 3 ranks of one thread each, float32, 256 features. Steps with and without
it alternate within one run and must give the same bits. The last figure is one handshake of a forward pass alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch

import wholebatch as wb
from wholebatch.bench.records import about
from wholebatch.contract import reduction
from wholebatch.testing import run_ranks

RESULTS = Path(__file__).parent / "results" / "backward_handshake.jsonl"
ROWS, FEATURES, REPEATS = (32, 512, 2048), 256, 31  # rows of a rank


def step(rows: int) -> Callable[[], torch.Tensor]:
    """Return a step on this rank's rows, which returns a gradient."""
    x, y = (torch.nn.functional.normalize(torch.randn(rows, FEATURES), dim=1) for _ in range(2))

    def run() -> torch.Tensor:
        local = x.clone().requires_grad_()
        wb.functional.clip_loss(local, y, 20.0).backward()
        assert local.grad is not None
        return local.grad

    return run


def without_comparison(run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return the step without the node that compares."""

    def bare() -> torch.Tensor:
        with patch.object(reduction, "together", lambda loss, *_args, **_settings: loss):
            return run()

    return bare


def on_this_rank() -> list[dict[str, Any]]:
    """Return the milliseconds of both steps and of a handshake, medians over alternating repeats."""
    torch.set_num_threads(1)
    comm, rows_of_table = wb.comm.TorchCommunicator(), []
    for rows in ROWS:
        run = step(rows)
        methods = {
            "with": run,
            "without": without_comparison(run),
            "handshake": lambda: comm.handshake(dict, caller="benchmark"),
        }
        assert torch.equal(run(), methods["without"]())
        times: dict[str, list[float]] = {name: [] for name in methods}
        for _ in range(REPEATS):
            for name, method in methods.items():
                torch.distributed.barrier()
                start = time.perf_counter()
                method()
                times[name].append(1e3 * (time.perf_counter() - start))
        rows_of_table.append({"rows of a rank": rows, "ms": {name: round(median(t), 3) for name, t in times.items()}})
    return rows_of_table


def main() -> None:
    """Print the table and save it."""
    with RESULTS.open("a") as file:
        for world_size in (2, 3):
            for found in run_ranks(on_this_rank, world_size, timeout_s=300)[0]:
                ms = found["ms"]
                print(f"{world_size} ranks, {found['rows of a rank']:5} rows each: " + ", ".join(
                    f"{name} {value:.2f} ms" for name, value in ms.items()
                ) + f"; {ms['with'] / ms['without'] - 1:+.1%}")  # fmt: skip
                file.write(json.dumps({"ranks": world_size, "features": FEATURES, **found, **about()}) + "\n")


if __name__ == "__main__":
    main()
