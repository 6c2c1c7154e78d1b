"""The planner's memory and time of declared losses against measurements.

    .venv/bin/python benchmarks/plan_pair_losses.py --rows 2048 4096 8192 [--time]

Memory is the rise of a process's peak in a second step, without features and their gradients. Times, which need a quiet
machine, are predicted by rates that are measured first: with those of the loss's own functions ("calibrated"), and
without them ("moved": by the bytes that its operations move, relative to CLIP's). Results go to
results/plan_pair_losses.json.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from wholebatch._launch.processes import run_processes
from wholebatch.bench.records import keep
from wholebatch.planning.check import check, rates_here, rise_of_a_step
from wholebatch.planning.counted import work_of
from wholebatch.planning.declared import declared
from wholebatch.planning.rates import Rates
from wholebatch.planning.shapes import ExchangeUsed, Shapes

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "plan_pair_losses.json"
NAMES = ("clip", "info_nce", "siglip", "sup_con", "lifted", "mined")


def memory_of(shapes: Shapes, exchange: ExchangeUsed) -> dict[str, float]:
    """Return predicted and measured megabytes."""
    predicted = work_of(shapes, exchange, "flat").loss
    found = run_processes(rise_of_a_step, shapes.ranks, shapes, exchange, "flat", timeout_s=1e3)[0]
    assert found is not None
    return _memory(predicted, found)


def times_of(shapes: Shapes, exchange: ExchangeUsed, rates: Rates) -> dict[str, float]:
    """Return megabytes, and predicted and measured seconds."""
    of = check(shapes, exchange, "flat", rates, within_s=1e3)
    assert of.bytes is not None
    assert shapes.declared is not None
    by_moved = rates.seconds("clip", shapes.embedding_size, work_of(shapes, exchange, "flat"))
    seconds = {"calibrated_s": of.predicted_seconds, "moved_s": by_moved, "measured_s": of.seconds}
    return {**_memory(of.predicted_bytes, of.bytes), **{name: round(one, 4) for name, one in seconds.items()}}


def _memory(predicted: int, measured: int) -> dict[str, float]:
    return {
        "predicted_mb": round(predicted / 1e6, 2),
        "measured_mb": round(measured / 1e6, 2),
        "error_of_memory": round(predicted / measured - 1, 4),
    }


def main() -> None:
    """Predict, measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--losses", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--exchange", default="gather", choices=("gather", "ring"))
    parser.add_argument("--time", action="store_true", help="times as well")
    options = parser.parse_args()
    for ranks in options.ranks:
        for name in options.losses:
            loss = f"{HERE / 'declared_losses.py'}:{name}"
            users = declared(loss, torch.float32)
            rates = rates_here((loss,), ranks, dtype=torch.float32, device="cpu") if options.time else None
            for rows in options.rows:
                shapes = Shapes(loss, rows, 512, ranks, declared=users)
                row = {"loss": name, "ranks": ranks, "exchange": options.exchange, "rows": rows, "embedding_size": 512}
                row |= (
                    memory_of(shapes, options.exchange) if rates is None else times_of(shapes, options.exchange, rates)
                )
                print(row, flush=True)
                keep(RESULTS, [row], ("loss", "ranks", "exchange", "rows"))


if __name__ == "__main__":
    main()
