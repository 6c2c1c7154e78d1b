"""Softmax over many classes: time against the torch.mm floor and other methods, memory, samples, a million classes.

    python benchmarks/partial_fc.py [time] [memory] [sample] [million] [--batch-size 2048] [--embedding-size 256]

"time": forward and backward of ArcFace over 100,000 classes, in turns: PartialFC with flat memory, with exponentials
kept, our dense transcription of the algorithm of PartialFC's second version (logits and softmax stored, margin on the
target under no_grad), torch.nn.functional.linear_cross_entropy, if torch has it, on normalized embeddings without a
margin, and ArcFaceLoss of pytorch-metric-learning, if it is installed (`make peers`). The floor is 8 B C d flops of
torch.mm. First every method with a margin is compared with the float64 reference at a size where that fits.
"memory": the memory of a step beyond centers, their gradient and inputs, at 200,000 classes.
"sample": whole steps with an optimizer, a tenth of the classes against all.
"million": steps over 1,000,000 classes.
Results go to results/partial_fc.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import wholebatch as wb
from wholebatch._measure import peak, rise_of_peak
from wholebatch.bench.records import keep

RESULTS = Path(__file__).parent / "results" / "partial_fc.json"
S, M = 64.0, 0.5
PEER = "pytorch-metric-learning"
TILES = 2**24  # bytes


class _DenseSoftmax(torch.autograd.Function):
    """Cross-entropy that replaces logits by the softmax, and the softmax by the gradient, in place."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        logits.sub_(logits.amax(1, keepdim=True)).exp_()
        logits.div_(logits.sum(1, keepdim=True))
        ctx.save_for_backward(logits, labels)
        return -logits.gather(1, labels[:, None]).clamp_min(1e-30).log().mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, labels = ctx.saved_tensors
        logits[torch.arange(len(labels)), labels] -= 1
        return logits.mul_(grad / len(labels)), None


def dense(x: Tensor, w: Tensor, y: Tensor, *, all_angles: bool = True) -> Tensor:
    """Return the dense loss; `all_angles` converts all logits to angles and back, as insightface's ArcFace does."""
    cosines = F.linear(F.normalize(x), F.normalize(w)).clamp(-1, 1)
    with torch.no_grad():
        target = cosines.gather(1, y[:, None])
        if all_angles:
            cosines.acos_().scatter_(1, y[:, None], target.acos() + M).cos_()
        else:
            cosines.scatter_(1, y[:, None], (target.acos() + M).cos())
    return _DenseSoftmax.apply(cosines * S, y)


def ours(x: Tensor, w: Tensor, y: Tensor, *, memory: Any = "flat", margin_grad: str = "exact") -> Tensor:
    return wb.functional.partial_fc_loss(x, y, w, margin=wb.ArcFace(S, M), memory=memory, margin_grad=margin_grad)


def torchs(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    return F.linear_cross_entropy(F.normalize(x), w, y)


class _PytorchMetricLearnings:
    """The peer's loss, whose classifier has its own weights (d, C); they are set before each step."""

    def __init__(self) -> None:
        from pytorch_metric_learning.losses import ArcFaceLoss

        self._made, self._loss = None, ArcFaceLoss

    def __call__(self, x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        if self._made is None or self._made.num_classes != len(w):
            self._made = self._loss(len(w), w.shape[1], margin=math.degrees(M), scale=S)
        return torch.func.functional_call(self._made, {"W": w.T}, (x, y))


def data(rows: int, classes: int, embedding_size: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, embedding_size), torch.randn(classes, embedding_size), torch.randint(classes, (rows,))


def gate(methods: dict[str, Callable[..., Tensor]]) -> None:
    """Compare loss and gradients with the dense reference, in float64, on the same numbers."""
    x, w, y = data(300, 2000, 32)
    for name, (method, margin_grad) in {
        "flat": (methods["flat"], "exact"),
        "kept": (methods["kept"], "exact"),
        "dense transcription": (methods["dense transcription"], "straight_through"),
        "dense, target's angle alone": (methods["dense, target's angle alone"], "straight_through"),
        **({PEER: (methods[PEER], "exact")} if PEER in methods else {}),
    }.items():
        found, true = [], []
        for into, call, dtype in (
            (found, method, torch.float32),
            (true, partial(_reference, margin_grad=margin_grad), torch.float64),
        ):
            a, b = x.to(dtype, copy=True).requires_grad_(), w.to(dtype, copy=True).requires_grad_()
            loss = call(a, b, y)
            loss.backward()
            into += [loss.detach(), a.grad, b.grad]
        if name.startswith("dense"):  # its value, unlike its gradient, is clamped at -ln 1e-30, as in the original
            found[0] = true[0]
        error = max(((z.double() - t).norm() / t.norm()).item() for z, t in zip(found, true, strict=True))
        if error > 1e-4:
            raise SystemExit(f"{name}: differs from the dense reference by {error:.1e}")


def _reference(x: Tensor, w: Tensor, y: Tensor, *, margin_grad: str) -> Tensor:
    return wb.reference.partial_fc_loss(x, y, w, margin=wb.ArcFace(S, M), margin_grad=margin_grad)


def floor(rows: int, classes: int, embedding_size: int, some: int = 8192) -> float:
    a, b, out = torch.randn(rows, embedding_size), torch.randn(some, embedding_size), torch.zeros(rows, some)
    start = time.perf_counter()
    torch.mm(a, b.T, out=out)
    return (time.perf_counter() - start) * classes / some * 4


def measure_time(batch_size: int, embedding_size: int, classes: int, steps: int) -> list[dict[str, Any]]:
    methods: dict[str, Callable[..., Tensor]] = {
        "flat": ours,
        "kept": partial(ours, memory=4 * batch_size * classes + TILES),
    }
    methods |= {"dense transcription": dense, "dense, target's angle alone": partial(dense, all_angles=False)}
    if hasattr(F, "linear_cross_entropy"):
        methods["linear_cross_entropy"] = torchs
    if importlib.util.find_spec("pytorch_metric_learning"):
        methods[PEER] = _PytorchMetricLearnings()
    gate(methods)
    x, w, y = data(batch_size, classes, embedding_size)
    x.requires_grad_(), w.requires_grad_()
    seconds: dict[str, list[float]] = {"floor": [], **{name: [] for name in methods}}
    for step in range(steps + 1):
        seconds["floor"].append(median(floor(batch_size, classes, embedding_size) for _ in range(5)))
        for name, method in methods.items():
            x.grad = w.grad = None
            start = time.perf_counter()
            method(x, w, y).backward()
            seconds[name].append(time.perf_counter() - start)
        if not step:
            seconds = {name: [] for name in seconds}  # the first is not counted
    rows = []
    for name, taken in seconds.items():
        of_floor, of_dense = (
            median(a / b for a, b in zip(taken, seconds[other], strict=True))
            for other in ("floor", "dense transcription")
        )
        rows.append(
            {
                "what": "time",
                "batch_size": batch_size,
                "classes": classes,
                "embedding_size": embedding_size,
                "method": name,
                "seconds": median(taken),
            }
            | {"of floor": of_floor, "of dense": of_dense}
        )
        print(f"| {name} | {median(taken):.2f} | {of_floor:.2f} | {of_dense:.2f} |", flush=True)
    return rows


def measure_memory(batch_size: int, embedding_size: int, classes: int) -> list[dict[str, Any]]:
    found = []
    for rows in (batch_size // 4, batch_size, 4 * batch_size):
        x, w, y = data(rows, classes, embedding_size)
        x.requires_grad_(), w.requires_grad_()
        rise = rise_of_peak(wb.comm.LocalCommunicator(), lambda x=x, w=w, y=y: ours(x, w, y).backward())
        assert rise is not None
        beyond = (rise - 4 * (classes + rows) * embedding_size) / 1e6
        found.append(
            {
                "what": "memory",
                "batch_size": rows,
                "classes": classes,
                "embedding_size": embedding_size,
                "method": "flat",
                "MB": beyond,
            }
        )
        print(f"| {rows} | {classes} | {beyond:.0f} | {4e-6 * rows * classes:.0f} |", flush=True)
    return found


def whole_step(
    head: wb.PartialFC, optimizer: torch.optim.Optimizer, rows: int, embedding_size: int, generator: torch.Generator
) -> float:
    x = torch.randn(rows, embedding_size, generator=generator).requires_grad_()
    y = torch.randint(head.num_classes, (rows,), generator=generator)
    start = time.perf_counter()
    head(x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - start


def measure_samples(batch_size: int, embedding_size: int, classes: int, steps: int) -> list[dict[str, Any]]:
    generator, methods = torch.Generator().manual_seed(0), {}
    for rate in (1.0, 0.1):
        head = wb.PartialFC(embedding_size, classes, margin=wb.ArcFace(S, M), sample_rate=rate, memory="flat")
        methods[rate] = head, wb.SparseSGD(head.parameters(), lr=0.1), []
    for _ in range(steps + 1):
        for head, optimizer, seconds in methods.values():
            seconds.append(whole_step(head, optimizer, batch_size, embedding_size, generator))
    full, sampled = (seconds[1:] for *_, seconds in methods.values())
    share = median(a / b for a, b in zip(sampled, full, strict=True))
    print(f"| whole steps | {median(full):.2f} | sampled {median(sampled):.2f} | {share:.3f} |", flush=True)
    row = {
        "what": "sample",
        "batch_size": batch_size,
        "classes": classes,
        "embedding_size": embedding_size,
        "method": "0.1 of all",
    }
    return [row | {"seconds": median(sampled), "seconds of all": median(full), "of all": share}]


def measure_million(batch_size: int, embedding_size: int, classes: int, steps: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    head = wb.PartialFC(embedding_size, classes, margin=wb.ArcFace(S, M), sample_rate=0.1)
    optimizer = wb.SparseSGD(head.parameters(), lr=0.1)
    seconds = [whole_step(head, optimizer, batch_size, embedding_size, generator) for _ in range(steps + 1)][1:]
    peak_mb = peak() / 1e6
    print(f"| a million classes | {median(seconds):.2f} s per step | {peak_mb:.0f} MB, the process |", flush=True)
    row = {
        "what": "million",
        "batch_size": batch_size,
        "classes": classes,
        "embedding_size": embedding_size,
        "method": "0.1 of all",
    }
    return [row | {"seconds": median(seconds), "process MB": peak_mb}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_of = ["time", "sample", "million", "memory"]
    parser.add_argument("what", nargs="*", help=", ".join(all_of), default=all_of)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--embedding-size", type=int, default=256)
    parser.add_argument("--classes", type=int, default=100_000, help="twice as many for memory, ten times for million")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    batch_size, embedding_size, classes = arguments.batch_size, arguments.embedding_size, arguments.classes
    torch.set_num_threads(2)
    rows: list[dict[str, Any]] = []
    if "million" in arguments.what:  # first: it reports the process's peak
        rows += measure_million(batch_size // 2, embedding_size // 2, 10 * classes, arguments.steps)
    if "time" in arguments.what:
        print("| method | s | of floor | of dense |\n|---|---|---|---|")
        rows += measure_time(batch_size, embedding_size, classes, arguments.steps)
    if "sample" in arguments.what:
        rows += measure_samples(batch_size, embedding_size, classes, arguments.steps)
    if rows:
        keep(RESULTS, rows, ["what", "batch_size", "classes", "embedding_size", "method"])
    if "memory" in arguments.what:
        if "MALLOC_MMAP_THRESHOLD_" not in os.environ:  # an allocator that gives back what is freed
            os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
            sizes = [f"--{name.replace('_', '-')}={value}" for name, value in vars(arguments).items() if name != "what"]
            os.execv(sys.executable, [sys.executable, sys.argv[0], "memory", *sizes])
        print("| batch size | classes | MB | MB of logits |\n|---|---|---|---|")
        keep(
            RESULTS,
            measure_memory(batch_size, embedding_size, 2 * classes),
            ["what", "batch_size", "classes", "embedding_size", "method"],
        )


if __name__ == "__main__":
    main()
