"""Declared losses beside the built-in losses of the same formulas: time of a step and its memory.

    .venv/bin/python benchmarks/pair_losses.py time --rows 4096 8192
    .venv/bin/python benchmarks/pair_losses.py time --rows 4096 8192 --compile --dense
    .venv/bin/python benchmarks/pair_losses.py memory --rows 4096 16384

Each pair of losses is first compared on a small batch. For the time both take turns in one process with one thread, and
so do the declared loss with compiled tiles and with memory for all of S, and the dense formula, eagerly and under
torch.compile, where its matrices fit; a ratio is the median over rounds. The memory is the rise of a process's peak
beyond inputs and the new gradients, each loss in a process of its own. Results go to results/pair_losses.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import declared  # noqa: E402

import wholebatch as wb  # noqa: E402
from wholebatch import _measure  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "pair_losses.json"
WIDTH, SCALE, SMALL = 512, 20.0, 96
NAMES = ("clip", "clip_partners", "info_nce", "siglip", "sup_con", "multi_similarity")


class Batch:
    """Two matrices of unit rows with classes and scalars, all with gradients."""

    def __init__(self, rows: int, width: int = WIDTH) -> None:
        made = torch.Generator().manual_seed(rows)
        self.x, self.y = (normalize(torch.randn(rows, width, generator=made), dim=1).requires_grad_() for _ in range(2))
        self.labels = torch.randint(0, max(2, rows // 8), (rows,), generator=made)
        self.scale, self.bias = torch.tensor(SCALE, requires_grad=True), torch.tensor(-10.0, requires_grad=True)

    def step(self, loss: Callable[[Batch], Tensor]) -> Tensor:
        """Return the loss after its backward pass."""
        for leaf in (self.x, self.y, self.scale, self.bias):
            leaf.grad = None
        value = loss(self)
        value.backward()
        return value.detach()


def _clip(**options: object) -> wb.PairLoss:
    negatives = wb.terms.LogSumExp(declared.scaled, where=declared.other)

    def loss(r: Any, x: Any, p: Any) -> Tensor:  # fields
        return softplus(r.negatives - r.own, threshold=40) / 2

    terms = {"negatives": negatives, "own": wb.terms.Partner(declared.scaled)}
    return wb.PairLoss(terms, loss, column_loss=loss, **options)


def _multi_similarity(**options: object) -> wb.PairLoss:
    return wb.PairLoss(
        {
            "far": wb.terms.LogSumExp(lambda s, x, y, p: -2 * (s - 0.5), where=declared.same),
            "near": wb.terms.LogSumExp(lambda s, x, y, p: 50 * (s - 0.5), where=declared.different),
        },
        lambda r, x, p: softplus(r.far) / 2 + softplus(r.near) / 50,
        similarity="cosine",
        **options,
    )


def declared_losses(**options: Any) -> dict[str, Callable[[Batch], Tensor]]:  # of PairLoss
    """Return the declared losses, by name."""
    clip, clip_partners = (of(**options) for of in (_clip, declared.clip))
    info_nce, siglip = (of(**options) for of in (declared.info_nce, declared.siglip))
    sup_con, multi_similarity = (of(symmetric=True, **options) for of in (declared.sup_con, _multi_similarity))
    return {
        "clip": lambda b: clip(b.x, b.y, parameters={"scale": b.scale}),
        "clip_partners": lambda b: clip_partners(b.x, b.y, parameters={"scale": b.scale}),
        "info_nce": lambda b: info_nce(b.x, b.y, parameters={"scale": b.scale}),
        "siglip": lambda b: siglip(b.x, b.y, parameters={"scale": b.scale, "bias": b.bias}),
        "sup_con": lambda b: sup_con(b.x, x_data={"label": b.labels}, parameters={"scale": SCALE}),
        "multi_similarity": lambda b: multi_similarity(b.x, x_data={"label": b.labels}),
    }


def losses_of(f: ModuleType) -> dict[str, Callable[[Batch], Tensor]]:
    """Return the same formulas from `wholebatch.functional`, built in, or `wholebatch.reference`, dense."""
    return {
        **dict.fromkeys(("clip", "clip_partners"), lambda b: f.clip_loss(b.x, b.y, b.scale)),
        "info_nce": lambda b: f.info_nce_loss(b.x, b.y, logit_scale=b.scale),
        "siglip": lambda b: f.siglip_loss(b.x, b.y, b.scale, b.bias),
        "sup_con": lambda b: f.sup_con_loss(b.x, b.labels, temperature=1 / SCALE),
        "multi_similarity": lambda b: f.multi_similarity_loss(b.x, b.labels),
    }


COMPILED = declared_losses(compile_tiles=True)


def check(name: str, *, compiled: bool) -> None:
    """Raise AssertionError unless the declared and the built-in loss are equal on a small batch."""
    results = []
    for losses in (losses_of(wb.functional), declared_losses(), *([COMPILED] if compiled else [])):
        batch = Batch(SMALL, 16)
        results.append((batch.step(losses[name]), batch.x.grad))
    (expected, wanted), *of_declared = results
    for value, grad in of_declared:
        assert torch.allclose(value, expected, rtol=1e-4, atol=1e-5), name
        assert torch.allclose(grad, wanted, rtol=1e-3, atol=1e-5), name


def times(name: str, rows: int, rounds: int, *, width: int, dense: bool, compiled: bool) -> list[dict[str, object]]:
    """Return milliseconds of a step, and ratios to the built-in loss."""
    batch = Batch(rows, width)
    methods = {"built in": losses_of(wb.functional)[name], "declared": declared_losses()[name]}
    if compiled:
        methods["declared, compile_tiles=True"] = COMPILED[name]
    if dense:
        formula = losses_of(wb.reference)[name]
        methods |= {"dense": formula, "dense, torch.compile": torch.compile(formula)}
        for compile_tiles in (False, True) if compiled else (False,):  # all of S, which the dense formula holds as well
            keeping = declared_losses(memory=2 * rows * rows * 4, compile_tiles=compile_tiles)[name]
            methods["declared, memory for S" + ", compile_tiles=True" * compile_tiles] = keeping
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(rounds + 1):  # the first is a warm-up
        for method, loss in methods.items():
            start = time.perf_counter()
            batch.step(loss)
            if number:
                seconds[method].append(time.perf_counter() - start)
    return [
        {
            "what": "time",
            "loss": name,
            "rows": rows,
            "embedding_size": width,
            "method": method,
            "milliseconds": 1e3 * median(of),
            "ratio": median(a / b for a, b in zip(of, seconds["built in"], strict=True)),
        }
        for method, of in seconds.items()
    ]


def memory(name: str, rows: int, method: str) -> float:
    """Return the megabytes by which a step raises the peak beyond inputs and gradients, in this process."""
    losses = losses_of(wb.functional)
    if method != "built in":
        losses = declared_losses() if method == "declared" else COMPILED
    Batch(SMALL).step(losses[name])
    _measure.map_each_tensor()
    batch = Batch(rows)
    batch.step(losses[name])
    leaves = (batch.x, batch.y, batch.scale, batch.bias)
    for leaf in leaves:
        leaf.grad = None
    before = _measure.reset_peak()
    losses[name](batch).backward()
    gradients = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return (_measure.peak() - before - gradients) / 2**20


def main() -> None:
    """Measure, print a table, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("time", "memory", "one"))
    parser.add_argument("--rows", type=int, nargs="+", default=[4096])
    parser.add_argument("--width", type=int, default=WIDTH, help="embedding size of `time`")
    parser.add_argument("--losses", nargs="+", default=NAMES, choices=NAMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="the declared losses with compiled tiles as well")
    parser.add_argument("--dense", action="store_true", help="the dense formulas as well")
    parser.add_argument("--method", default="declared")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "one":  # of `memory`, in a process of its own
        print(memory(options.losses[0], options.rows[0], options.method))
        return
    for name in options.losses:
        check(name, compiled=options.compile)
    found: list[dict[str, object]] = []
    for rows in options.rows:
        for name in options.losses:
            if options.what == "time":
                new = times(
                    name, rows, options.rounds, width=options.width, dense=options.dense, compiled=options.compile
                )
            else:
                new = []
                for method in ("built in", "declared", *(["declared, compile_tiles=True"] * options.compile)):
                    command = [
                        sys.executable,
                        __file__,
                        "one",
                        "--rows",
                        str(rows),
                        "--losses",
                        name,
                        "--method",
                        method,
                    ]
                    done = subprocess.run(command, capture_output=True, text=True, check=True)
                    new.append({"what": "memory", "loss": name, "rows": rows, "method": method})
                    new[-1] |= {"embedding_size": WIDTH, "megabytes": float(done.stdout)}
            found += new
            for row in new:
                print(
                    {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "what"}, flush=True
                )
    keep(RESULTS, found, ("what", "loss", "rows", "embedding_size"))


if __name__ == "__main__":
    main()
