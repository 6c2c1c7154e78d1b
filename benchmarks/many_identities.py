"""Steps over ten million identities: time of each part against one pass through memory, and peak memory.

    python benchmarks/many_identities.py [--classes 10000000] [--steps 5] [--batch-size 256] [--threads 2]

A step is that of `PartialFC` with a tenth of the classes and of `SparseSGD` with momentum, in float32. The floor is one
pass over the same rows, timed after each step: index_select, add_ and index_copy_ of the centers, some rows at a time.
The optimizer does so twice, for centers and momentum, and reads the gradient. First, at a small size, some steps are
compared with those of a dense float64 reference that knows only which classes were drawn.
Memory is the peak of the process beyond its peak before the head, and beyond centers and momentum.
At 10,000,000 classes the process takes 11.5 GB. Results go to results/many_identities.json.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb
from wholebatch._measure import peak
from wholebatch.bench.records import keep

RESULTS = Path(__file__).parent / "results" / "many_identities.json"
RATE, LR, MOMENTUM = 0.1, 0.1, 0.9
MARGIN = wb.ArcFace(64.0, 0.5)
PIECE = 512  # rows of a piece of the floor


def made(embedding_size: int, classes: int) -> tuple[wb.PartialFC, wb.SparseSGD]:
    head = wb.PartialFC(embedding_size, classes, margin=MARGIN, sample_rate=RATE, memory="flat")
    return head, wb.SparseSGD(head.parameters(), lr=LR, momentum=MOMENTUM)


def batch(rows: int, embedding_size: int, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, embedding_size, generator=generator)
    return x.requires_grad_(), torch.randint(classes, (rows,), generator=generator)


def gate(embedding_size: int, classes: int = 5000, rows: int = 64, steps: int = 4) -> None:
    """Compare centers and momentum after some steps with a dense reference in float64."""
    head, optimizer = made(embedding_size, classes)
    centers = head.weight.detach().double()
    momentum, generator = torch.zeros_like(centers), torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = batch(rows, embedding_size, classes, generator)
        head(x, y).backward()
        assert head.weight.grad is not None
        index = head.weight.grad.coalesce().indices()[0]
        some = centers[index].requires_grad_()
        wb.reference.partial_fc_loss(x.detach().double(), y, some, margin=MARGIN, class_ids=index).backward()
        assert some.grad is not None
        momentum[index] = MOMENTUM * momentum[index] + some.grad
        centers[index] -= LR * momentum[index]
        optimizer.step()
        optimizer.zero_grad()
    of_head = optimizer.state[head.weight]["momentum_buffer"]
    for name, found, true in (("centers", head.weight.detach(), centers), ("momentum", of_head, momentum)):
        error = ((found.double() - true).norm() / true.norm()).item()
        if not error < 1e-4:
            raise SystemExit(f"{name}: differ from the dense reference by {error:.1e}")


@torch.no_grad()
def floor(weight: Tensor, index: Tensor) -> float:
    """Return the time of one pass over these rows; adding 0 leaves them unchanged."""
    buffer = weight.new_empty(PIECE, weight.shape[1])
    start = time.perf_counter()
    for some in index.split(PIECE):
        rows = torch.index_select(weight, 0, some, out=buffer[: len(some)])
        weight.index_copy_(0, some, rows.add_(0.0))
    return time.perf_counter() - start


def measure(rows: int, embedding_size: int, classes: int, steps: int) -> list[dict[str, Any]]:
    before, generator = peak(), torch.Generator().manual_seed(0)
    start = time.perf_counter()
    head, optimizer = made(embedding_size, classes)
    begin = time.perf_counter() - start
    seconds: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "optimizer", "floor")}
    sampled = 0
    for step in range(steps + 1):
        x, y = batch(rows, embedding_size, classes, generator)
        start = time.perf_counter()
        loss = head(x, y)
        after_forward = time.perf_counter()
        loss.backward()
        after_backward = time.perf_counter()
        optimizer.step()
        ends = (start, after_forward, after_backward, time.perf_counter())
        for name, first, last in zip(seconds, ends[:-1], ends[1:], strict=False):
            seconds[name].append(last - first)
        assert head.weight.grad is not None
        index = head.weight.grad._indices()[0]
        sampled = len(index)
        optimizer.zero_grad()
        seconds["floor"].append(floor(head.weight, index))
        print(step, *(f"{name} {taken[-1]:.2f} s" for name, taken in seconds.items()), flush=True)
    beyond = (peak() - before - 2 * head.weight.nbytes) / 1e9
    print(f"begin {begin:.1f} s; {beyond:.2f} GB beyond centers and momentum; peak {peak() / 1e9:.2f} GB", flush=True)
    sizes = {
        "batch_size": rows,
        "classes": classes,
        "embedding_size": embedding_size,
        "sampled": sampled,
        "threads": torch.get_num_threads(),
    }
    memory = {"GB beyond centers and momentum": round(beyond, 3), "peak GB": round(peak() / 1e9, 2)}
    records: list[dict[str, Any]] = [{**sizes, "method": "begin", "seconds": begin, **memory}]
    for name, taken in seconds.items():
        counted = taken[1:]  # the first step allocates the momentum
        of_floor = median(a / b for a, b in zip(counted, seconds["floor"][1:], strict=True))
        figures = {"seconds": median(counted), "fastest": min(counted), "of floor": of_floor}
        records.append({**sizes, "method": name, **figures})
        print(f"| {name} | {median(counted):.2f} | {min(counted):.2f} | {of_floor:.2f} |", flush=True)
    return records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--embedding-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="1 on a machine that others use: threads wait for all")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    gate(given.embedding_size)
    records = measure(given.batch_size, given.embedding_size, given.classes, given.steps)
    keep(RESULTS, records, ["method", "batch_size", "classes", "embedding_size", "threads"])


if __name__ == "__main__":
    main()
