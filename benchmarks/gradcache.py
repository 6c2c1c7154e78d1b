"""Gradient caching: time against the uncached step, memory while the batch grows, and a peer on the same encoder.

    python benchmarks/gradcache.py [counts] [time] [memory] [--batch-size 256] [--chunk-size 32]

"counts": how many functions of Python a step of 16 chunks calls, beside ten plain lines without any check.

The encoder is a small transformer. "time": one step of each method in turn, medians of their ratios to the uncached
step of the same batch; first every method's gradient is compared with the uncached one. "deferred" and "encode" go
backward as a trainer does; their ratio to the step that goes backward itself ("none kept") is printed as well. With
sentence-transformers installed (`make peers`), its CachedMultipleNegativesRankingLoss encodes with the same weights,
chunk and batch. "memory": the rise of the process's peak at a fixed chunk, from half of --batch-size to 16 times that,
with the loss. Results go to results/gradcache.json, the picture to results/gradcache.png.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._base.third_party import declare_torchvision_operators, version
from wholebatch._measure import rise_of_peak
from wholebatch.bench.records import keep, read

RESULTS = Path(__file__).parent / "results" / "gradcache.json"
EMBEDDING_SIZE, LAYERS, TOKENS, VOCABULARY, SCALE = 256, 4, 32, 1000, 20.0
PEER = "sentence-transformers"
METHODS: dict[str, Any] = {"none kept": 0, "half kept": 0.5, "all kept": 1.0, "auto": "auto"}


class Encoder(nn.Module):
    """A transformer from tokens (b, n) to unit features (b, d)."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, EMBEDDING_SIZE)
        layer = nn.TransformerEncoderLayer(
            EMBEDDING_SIZE, 4, 4 * EMBEDDING_SIZE, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return normalize(self.layers(self.embedding(tokens)).mean(1), dim=1)


def loss_fn(queries: Tensor, keys: Tensor) -> Tensor:
    return wb.functional.info_nce_loss(queries, keys, logit_scale=SCALE)


def batch(size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(VOCABULARY, (size, TOKENS), generator=generator) for _ in range(2))
    return x, torch.where(torch.rand(size, TOKENS, generator=generator) < 0.7, x, y)


def uncached(encoder: nn.Module, x: Tensor, y: Tensor) -> None:
    loss_fn(encoder(x), encoder(y)).backward()


def deferred(encoder: nn.Module, chunk_size: int) -> dict[str, Callable[[Tensor, Tensor], None]]:
    """Return the steps whose backward pass is the caller's."""
    cache = wb.GradCache([encoder, encoder], chunk_size, loss_fn, deferred=True)

    def encoded(x: Tensor, y: Tensor) -> None:
        loss_fn(*(wb.gradcache.encode(encoder, z, chunk_size) for z in (x, y))).backward()

    return {"deferred": lambda x, y: cache(x, y).backward(), "encode": encoded}


def peers(encoder: nn.Module, chunk_size: int) -> dict[str, Callable[[Tensor, Tensor], None]]:
    """Return sentence-transformers' loss and its cached form, on this encoder."""
    if version(PEER) is None:
        return {}
    declare_torchvision_operators()
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss, MultipleNegativesRankingLoss

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, features: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
            return {**features, "sentence_embedding": self.encoder(features["input_ids"])}

    model = SentenceTransformer(modules=[Wrapped()], device="cpu")
    losses = {
        PEER: MultipleNegativesRankingLoss(model, scale=SCALE),
        f"{PEER}, cached": CachedMultipleNegativesRankingLoss(model, scale=SCALE, mini_batch_size=chunk_size),
    }

    def step(loss: nn.Module) -> Callable[[Tensor, Tensor], None]:
        def run(x: Tensor, y: Tensor) -> None:
            columns = [{"input_ids": z, "attention_mask": torch.ones_like(z)} for z in (x, y)]
            loss(columns, None).backward()

        return run

    return {name: step(loss) for name, loss in losses.items()}


def gradient(encoder: nn.Module) -> Tensor:
    found = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
    encoder.zero_grad()
    return found


def measure_time(batch_size: int, chunk_size: int, steps: int) -> list[dict[str, Any]]:
    encoder = Encoder()
    x, y = batch(batch_size)
    methods: dict[str, Callable[[Tensor, Tensor], Any]] = {"uncached": lambda x, y: uncached(encoder, x, y)}
    for name, kept in METHODS.items():
        methods[name] = wb.GradCache([encoder, encoder], chunk_size, loss_fn, keep_graphs=kept)
    methods |= deferred(encoder, chunk_size) | peers(encoder, chunk_size)
    uncached(encoder, x, y)
    true = gradient(encoder)
    for name, method in methods.items():
        method(x, y)
        error = ((gradient(encoder) - true).norm() / true.norm()).item()
        if error > 1e-4:
            raise SystemExit(f"{name}: its gradient differs from the uncached one by {error:.1e}")
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(steps):
        for name, method in methods.items():
            encoder.zero_grad()
            start = time.perf_counter()
            method(x, y)
            seconds[name].append(time.perf_counter() - start)
    rowset = []
    for name, taken in seconds.items():
        ratio, of_itself = (
            median(a / b for a, b in zip(taken, seconds[of], strict=True)) for of in ("uncached", "none kept")
        )
        rowset.append(
            {
                "what": "time",
                "batch_size": batch_size,
                "chunk_size": chunk_size,
                "method": name,
                "seconds": median(taken),
                "of uncached": ratio,
                "of none kept": of_itself,
            }
        )
        print(f"| {name} | {1e3 * median(taken):.0f} | {ratio:.3f} | {of_itself:.3f} |", flush=True)
    return rowset


def plain(encoder: nn.Module, x: Tensor, y: Tensor, chunk_size: int) -> None:
    """Make the two passes and nothing else."""
    chunks = [*x.split(chunk_size), *y.split(chunk_size)]
    with torch.no_grad():
        features = torch.cat([encoder(part) for part in chunks]).requires_grad_()
    loss_fn(*features.split(len(x))).backward()
    assert features.grad is not None
    for part, grad in zip(chunks, features.grad.split(chunk_size), strict=True):
        encoder(part).backward(grad)


def count_calls() -> list[dict[str, Any]]:
    """Count the calls of functions of Python in a step of 16 chunks of each batch, encoders of 12 layers."""
    encoder = Encoder(layers=12)
    x, y = batch(32)
    cache = wb.GradCache([encoder, encoder], 2, loss_fn)
    steps = {"plain lines": lambda: plain(encoder, x, y, 2), "none kept": lambda: cache(x, y)}
    found = []
    for method, step in steps.items():
        step()
        calls = Counter[str]()

        def note(_frame: object, event: str, _argument: object, calls: Counter[str] = calls) -> None:
            calls[event] += 1

        sys.setprofile(note)
        try:
            step()
        finally:
            sys.setprofile(None)
        found.append({"what": "counts", "batch_size": 32, "chunk_size": 2, "method": method, "calls": calls["call"]})
        print(f"| {method} | {calls['call']} | {calls['call'] / found[0]['calls']:.2f} |", flush=True)
    return found


def measure_memory(smallest: int, chunk_size: int) -> list[dict[str, Any]]:
    """Measure cached steps up to 16 times the smallest batch, and uncached ones up to 4 times: enough for the trend."""
    found = []
    theirs = f"{PEER}, cached"
    for method, sizes in (("none kept", 5), ("deferred", 5), (theirs, 5), ("uncached", 3)):
        if method == theirs and version(PEER) is None:
            continue
        for batch_size in (smallest * 2**k for k in range(sizes)):
            encoder = Encoder()
            x, y = batch(batch_size)
            step: Callable[[Tensor, Tensor], Any] = partial(uncached, encoder)
            if method != "uncached":
                own = wb.GradCache([encoder, encoder], chunk_size, loss_fn)
                step = {**deferred(encoder, chunk_size), **peers(encoder, chunk_size)}.get(method, own)
            step(x[:chunk_size], y[:chunk_size])  # gradients exist, as in a second step
            rise = rise_of_peak(wb.comm.LocalCommunicator(), partial(step, x, y))
            assert rise is not None
            found.append(
                {
                    "what": "memory",
                    "batch_size": batch_size,
                    "chunk_size": chunk_size,
                    "method": method,
                    "MB": rise / 1e6,
                }
            )
            print(f"| {method} | {batch_size} | {rise / 1e6:.0f} |", flush=True)
    return found


def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw memory over the batch, and the time of each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, times) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    lines = {"uncached": "0.5", "none kept": "C0", f"{PEER}, cached": "C1"}  # deferred is the same line as "none kept"
    for method, color in lines.items():
        points = sorted(
            (row["batch_size"], row["MB"]) for row in rows if row["what"] == "memory" and row["method"] == method
        )
        memory.plot(*zip(*points, strict=True), "o-", label=method, color=color)
        below = method.startswith(PEER)
        for x, y in points:
            at = {"xytext": (0, -12 if below else 5), "textcoords": "offset points"}
            memory.annotate(f"{y:.0f}", (x, y), ha="center", fontsize=8, **at)
    memory.set(xscale="log", yscale="log", xlabel="pairs in the batch", ylabel="memory of a step, MB")
    ticks = sorted({row["batch_size"] for row in rows if row["what"] == "memory"})
    memory.set_xticks(ticks, ticks)
    memory.minorticks_off()
    memory.margins(y=0.12)
    memory.legend(frameon=False)
    bars = [row for row in rows if row["what"] == "time"]
    drawn = times.barh(
        [row["method"].replace(f"{PEER}, ", f"{PEER},\n") for row in bars],
        [row["of uncached"] for row in bars],
        color=["C1" if PEER in row["method"] else lines.get(row["method"], "C0") for row in bars],
    )
    times.bar_label(drawn, fmt=" %.2f", fontsize=8)
    times.set(xlabel="time relative to the uncached step")
    times.margins(x=0.15)
    times.invert_yaxis()
    for axis in (memory, times):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def with_exact_memory() -> None:
    """Restart with an allocator that returns freed memory; its reserves would be counted as the step's memory."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="counts, time, memory", default=["counts", "time", "memory"])
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    if "counts" in arguments.what:
        print("| method | calls | of plain lines |\n|---|---|---|")
        keep(RESULTS, count_calls(), ["what", "batch_size", "chunk_size", "method"])
    if "time" in arguments.what:
        print("| method | ms | of uncached | of none kept |\n|---|---|---|---|")
        keep(
            RESULTS,
            measure_time(arguments.batch_size, arguments.chunk_size, arguments.steps),
            ["what", "batch_size", "chunk_size", "method"],
        )
    if "memory" in arguments.what:
        if "time" in arguments.what:
            sys.argv = [
                sys.argv[0],
                "memory",
                "--batch-size",
                str(arguments.batch_size),
                "--chunk-size",
                str(arguments.chunk_size),
            ]
        with_exact_memory()
        print("| method | batch size | MB |\n|---|---|---|")
        keep(
            RESULTS,
            measure_memory(arguments.batch_size // 2, arguments.chunk_size),
            ["what", "batch_size", "chunk_size", "method"],
        )
        picture(read(RESULTS, ["what"]), RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
