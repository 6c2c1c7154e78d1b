"""Time of the host in a step of CLIP: on W ranks whose communication costs nothing, and on one rank in small batches.

Usage: python benchmarks/host_time.py [ranks | counts | small | profile]

`ranks`: forward and backward of `clip_loss` on one rank of torch's fake process group, which copies and never waits.
With few rows a rank, the rest is the host's work: the handshake at the entry, and all of a step. The count of
aten operators says the same without a clock. "even" is a step with even=True. `small`: B x 512 on one process, beside
the dense formula in PyTorch.
`profile`: where the time of a step of 32 pairs goes. Figures are the fastest of several hundred repeats, on one thread:
others share the machine's cores.

`counts`: operators, collectives and reads of a step in which each rank has one tile of rows, as with b = 4096 on a GPU
(a tile of 4096; 512 columns). Here a tile has side 64 and features 16 columns, on the CPU: these counts are the same.
Tensors travel as between GPUs. Operators are aten's, without views and allocations: about one launch each on a GPU.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import wholebatch as wb
from wholebatch.losses import clip

RESULTS = Path(__file__).parent / "results" / "host_time.jsonl"
SIZES, BATCHES = (1, 8, 256, 1024), (32, 64, 128, 256, 512, 1024)
ROWS, FEATURES, WIDTH, REPEATS = 4, 16, 512, 401  # rows of a rank on the fake group; columns of both


class Counting(TorchDispatchMode):
    """Count aten operators and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {"aten": 0, "c10d": 0}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        launched = not func.is_view and not func.__name__.startswith(("empty", "new_empty", "detach"))
        if func.namespace == "c10d" or launched:
            self.found["c10d" if func.namespace == "c10d" else "aten"] += 1
        return func(*args, **(kwargs or {}))


def inputs(rows: int, width: int) -> list[Tensor]:
    """Return normalized images and texts, and a scale, all of which need a gradient."""
    x, y = (F.normalize(torch.randn(rows, width), dim=1).requires_grad_() for _ in range(2))
    return [x, y, torch.tensor(20.0, requires_grad=True)]


def dense(x: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return CLIP's loss from the whole similarity matrix."""
    logits, target = scale * x @ y.T, torch.arange(len(x))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def timed_ms(acts: dict[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
    """Return the fewest milliseconds of each act, in alternation."""
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats + 3):
        for name, act in acts.items():
            start = time.perf_counter()
            act()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: round(min(found[3:]), 3) for name, found in times.items()}


def step_on(size: int) -> dict[str, Any]:
    """Return the host's milliseconds of a step on one of `size` ranks, and its operators forward and backward."""
    if size > 1:
        dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    given = inputs(ROWS, FEATURES)
    entries: list[float] = []
    agree = clip.agree

    def timed_agree(*args: Any) -> Any:
        start = time.perf_counter()
        facts = agree(*args)
        entries.append(1e3 * (time.perf_counter() - start))
        return facts

    forward: list[float] = []

    def step() -> None:
        start = time.perf_counter()
        loss = wb.functional.clip_loss(*given)
        forward.append(1e3 * (time.perf_counter() - start))
        loss.backward()

    def even_step() -> None:
        wb.functional.clip_loss(*given, even=True).backward()

    with patch.object(clip, "agree", timed_agree):
        whole = timed_ms({"step": step}, repeats=REPEATS if size < 100 else 61)["step"]
    even = timed_ms({"step": even_step}, repeats=REPEATS if size < 100 else 61)["step"]
    with Counting() as seen:
        loss = wb.functional.clip_loss(*given)
    with Counting() as backward:
        loss.backward()
    if size > 1:
        dist.destroy_process_group()
    ms = {"entry": round(min(entries), 3), "forward": round(min(forward), 3), "step": whole, "even": even}
    return {"W": size, "ms": ms, "operators": {"forward": seen.found, "backward": backward.found}}


def counts_on(size: int) -> dict[str, Any]:
    """Return the operators and the collectives of forward and backward on one of `size` ranks, as between GPUs."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    given = inputs(64, FEATURES)
    found: dict[str, Any] = {"W": size}
    with (
        patch("wholebatch.comm.backends.Backends.on_device", lambda *_: True),
        patch("wholebatch.nodes.route.default_side", lambda _: 64),
        patch("wholebatch.nodes.route.columns_of_a_chunk", lambda *_: 64),
    ):
        with Counting() as forward:
            loss = wb.functional.clip_loss(*given)
        with Counting() as backward:
            loss.backward()
    dist.destroy_process_group()
    return {**found, "forward": forward.found, "backward": backward.found}


def small(rows: int) -> dict[str, Any]:
    """Return the milliseconds of forward and backward beside the dense formula, if both agree."""
    given = inputs(rows, WIDTH)
    found, expected = (torch.autograd.grad(loss(*given), given) for loss in (wb.functional.clip_loss, dense))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    return {
        "B": rows,
        "ms": timed_ms(
            {
                "wholebatch": lambda: torch.autograd.grad(wb.functional.clip_loss(*given), given),
                "dense": lambda: torch.autograd.grad(dense(*given), given),
            },
            repeats=REPEATS if rows <= 256 else 61,
        ),
    }


def profile() -> None:
    """Print the functions in which a small step spends its time."""
    given = inputs(32, WIDTH)
    profiler = cProfile.Profile()
    for repeat in range(300):
        if repeat == 20:
            profiler.enable()
        wb.functional.clip_loss(*given).backward()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def main() -> None:
    """Print the tables and save them."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    which = sys.argv[1:] or ["ranks", "counts", "small"]
    if which == ["profile"]:
        profile()
        return
    from wholebatch.bench.records import about

    rows: list[dict[str, Any]] = []
    if "ranks" in which:
        rows += [step_on(size) for size in SIZES]
    if "counts" in which:
        rows += [counts_on(size) for size in (8, 1024)]
    if "small" in which:
        rows += [small(size) for size in BATCHES]
    with RESULTS.open("a") as file:
        for row in rows:
            print(row, flush=True)
            file.write(json.dumps({**row, **about()}) + "\n")


if __name__ == "__main__":
    main()
