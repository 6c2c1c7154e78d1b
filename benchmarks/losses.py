"""Measure the losses at the sizes that the documentation quotes: time, floor, peers, memory, growth.

    make peers                       # an environment with the libraries to compare with
    .venv-peers/bin/python benchmarks/losses.py [NAME ...]

Figures go to results/losses.json, their picture beside it (docs/images/bench_loss.png is a copy). Each case is one call
of `wholebatch bench loss`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from wholebatch.bench.config import LossConfig
from wholebatch.bench.run_loss import run_loss

RESULTS = Path(__file__).parent / "results" / "losses.json"

CASES = {
    "clip": LossConfig(
        losses=("clip",), batch_size=8192, keep=(0.0, 2.0, 4.0), dtypes=("float32", "bfloat16"), results=RESULTS
    ),
    "info_nce": LossConfig(losses=("info_nce",), batch_size=8192, results=RESULTS),
    "siglip": LossConfig(losses=("siglip",), batch_size=8192, results=RESULTS),
    "nt_xent": LossConfig(losses=("nt_xent",), batch_size=8192, results=RESULTS),
    "nt_xent 1024": LossConfig(losses=("nt_xent",), batch_size=1024, results=RESULTS),
    "two ranks": LossConfig(
        losses=("clip", "siglip"),
        batch_size=8192,
        ranks=(2,),
        exchanges=("gather", "ring"),
        keep=(0.0,),
        results=RESULTS,
    ),
    "growth 16k": LossConfig(losses=("clip",), batch_size=16384, keep=(0.0,), peers=False, results=RESULTS),
    "growth 32k": LossConfig(losses=("clip",), batch_size=32768, keep=(0.0,), peers=False, steps=3, results=RESULTS),
}

if __name__ == "__main__":
    if unknown := {*sys.argv[1:]} - {*CASES}:
        sys.exit(f"usage: python benchmarks/losses.py [NAME ...], names of {', '.join(CASES)}; got {sorted(unknown)}")
    for name in sys.argv[1:] or CASES:
        print(f"== {name}", flush=True)
        run_loss(CASES[name])
