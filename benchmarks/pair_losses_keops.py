"""A declared loss beside the same formula in PyKeOps, which also stores no matrix of pairs: time of a step on one CPU.

    python -m venv .venv-keops && .venv-keops/bin/pip install torch==2.13.0 numpy pykeops==2.3
    .venv-keops/bin/python benchmarks/pair_losses_keops.py --rows 4096 --embedding-sizes 128 512

The formula is CLIP's. Both are compared on a small batch first; then they take turns in one process with one thread; a
ratio is the median over rounds. Results go to results/pair_losses_keops.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import pykeops
import torch
from pykeops.torch import LazyTensor
from torch import Tensor
from torch.nn.functional import normalize

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import declared  # noqa: E402

from wholebatch.bench.records import keep  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pair_losses_keops.json"
SCALE = 20.0


def features(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """Return two matrices of unit rows, with gradients."""
    made = torch.Generator().manual_seed(rows)
    x, y = (normalize(torch.randn(rows, size, generator=made), dim=1).requires_grad_() for _ in range(2))
    return x, y


def by_keops(x: Tensor, y: Tensor) -> Tensor:
    """Return CLIP's loss by symbolic reductions."""
    s = (LazyTensor(x[:, None]) * LazyTensor(y[None])).sum(-1) * SCALE
    return (s.logsumexp(1).mean() + s.logsumexp(0).mean()) / 2 - SCALE * (x * y).sum(1).mean()


def step(loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """Return the loss after its backward pass."""
    x.grad = y.grad = None
    value = loss(x, y)
    value.backward()
    return value.detach()


def main() -> None:
    """Compare, measure, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--embedding-sizes", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clip = declared.clip(parameters={"scale": SCALE})
    methods: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "declared": clip,
        f"pykeops {pykeops.__version__}": by_keops,
    }
    x, y = features(96, 16)
    value, expected = (step(loss, x, y) for loss in methods.values())
    assert torch.allclose(value, expected, rtol=1e-4), (value, expected)
    found: list[dict[str, object]] = []
    for rows in options.rows:
        for size in options.embedding_sizes:
            x, y = features(rows, size)
            seconds: dict[str, list[float]] = {method: [] for method in methods}
            for number in range(options.rounds + 1):  # the first compiles
                for method, loss in methods.items():
                    start = time.perf_counter()
                    step(loss, x, y)
                    if number:
                        seconds[method].append(time.perf_counter() - start)
            for method, of in seconds.items():
                ratio = median(a / b for a, b in zip(of, seconds["declared"], strict=True))
                row: dict[str, object] = {"loss": "clip", "rows": rows, "embedding_size": size, "method": method}
                found.append({**row, "milliseconds": 1e3 * median(of), "ratio": ratio})
                print(found[-1], flush=True)
    keep(RESULTS, found, ("loss", "rows", "embedding_size"))


if __name__ == "__main__":
    main()
