"""All losses: transient memory at three sizes of the batch, and time as a multiple of CLIP's sweep in the same run.

    python benchmarks/family.py [NAME ...] [--rows 4096 8192 16384]

Every loss has a similarity matrix of rows x rows: two views of rows / 2 examples, rows examples in classes of four, a
queue of as many keys. First each is compared with its reference at 256 rows. Prints a table in Markdown and writes
results/family.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._measure import rise_of_peak
from wholebatch.bench.records import keep

RESULTS = Path(__file__).parent / "results" / "family.json"
EMBEDDING_SIZE, STEPS = 256, 3
Call = Callable[[Any, "Batch"], Tensor]


class Batch:
    """The inputs of every loss, with `rows` rows."""

    def __init__(self, rows: int, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(0)

        def unit(*shape: int) -> Tensor:
            return normalize(torch.randn(*shape, generator=generator, dtype=dtype), dim=-1)

        self.x = unit(rows, EMBEDDING_SIZE).requires_grad_()
        self.y = normalize(self.x.detach() + 0.5 * unit(rows, EMBEDDING_SIZE), dim=1).requires_grad_()
        self.half = self.x.detach()[: rows // 2].requires_grad_(), self.y.detach()[: rows // 2].requires_grad_()
        self.queue, self.teacher = unit(rows, EMBEDDING_SIZE), (unit(rows, EMBEDDING_SIZE), unit(rows, EMBEDDING_SIZE))
        self.hard = unit(rows, 4, EMBEDDING_SIZE)
        self.labels = torch.arange(rows) // 4
        self.scale = torch.tensor(14.3, dtype=dtype)
        self.new = torch.full((rows,), -torch.inf)


def directions(*names: str, **options: Any) -> Call:
    return lambda f, b: f.info_nce_loss(b.x, b.y, logit_scale=b.scale, directions=names, **options)


def views(name: str, **options: Any) -> Call:
    return lambda f, b: getattr(f, name)(*b.half, temperature=0.1, **options)


def classes(name: str, **options: Any) -> Call:
    return lambda f, b: getattr(f, name)(b.x, b.labels, **options)


CASES: dict[str, Call] = {
    "clip_loss": lambda f, b: f.clip_loss(b.x, b.y, b.scale),
    "clip_loss, ids": lambda f, b: f.clip_loss(b.x, b.y, b.scale, ids=b.labels),
    "clip_loss, label smoothing": lambda f, b: f.clip_loss(b.x, b.y, b.scale, label_smoothing=0.1),
    "info_nce_loss": directions("query_to_key"),
    "info_nce_loss, four directions": directions("query_to_key", "key_to_query", "query_to_query", "key_to_key"),
    "info_nce_loss, exclude_above": directions("query_to_key", exclude_above=0.05),
    "info_nce_loss, hard negatives": lambda f, b: f.info_nce_loss(b.x, b.y, logit_scale=b.scale, hard_negatives=b.hard),
    "siglip_loss": lambda f, b: f.siglip_loss(b.x, b.y, b.scale, -10.0),
    "nt_xent_loss": views("nt_xent_loss"),
    "dcl_loss": views("dcl_loss"),
    "debiased_loss": views("debiased_loss"),
    "debiased_loss, beta": views("debiased_loss", beta=1.0),
    "sup_con_loss": classes("sup_con_loss"),
    "multi_similarity_loss": classes("multi_similarity_loss"),
    "multi_similarity_loss, mined": classes("multi_similarity_loss", epsilon=0.1),
    "circle_loss": classes("circle_loss"),
    "triplet_loss": classes("triplet_loss"),
    "smooth_ap_loss": classes("smooth_ap_loss"),
    "moco_loss": lambda f, b: f.moco_loss(b.x, b.y, b.queue, logit_scale=b.scale),
    "global_contrastive_loss": lambda f, b: f.global_contrastive_loss(b.x, b.y, b.new, b.new)[0],
    "matryoshka_loss, 4 sizes": lambda f, b: f.matryoshka_loss(b.x, b.y, logit_scale=b.scale, dims=(32, 64, 128, 256)),
    "distillation_loss": lambda f, b: f.distillation_loss(b.x, b.y, b.scale, *b.teacher, 10.0),
}


def step(call: Call, batch: Batch, functions: Any = wb.functional) -> list[Tensor]:
    """Return the loss and the gradients of its features."""
    loss = call(functions, batch)
    leaves = [batch.x, batch.y, *batch.half]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in found if gradient is not None)]


def check(name: str) -> None:
    """Raise unless loss and gradients equal the reference's in float64."""
    ours, reference = (step(CASES[name], Batch(256, torch.float64), f) for f in (wb.functional, wb.reference))
    for got, true in zip(ours, reference, strict=True):
        assert (got - true).abs().max() <= 1e-9 * true.abs().max(), f"{name} differs from its reference"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CASES))
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[4096, 8192, 16384],
        help="rows of the similarity matrix: the batch size, or twice that for two views",
    )  # fmt: skip
    arguments = parser.parse_args()
    if unknown := {*arguments.names} - {*CASES}:
        parser.error(f"names must be of {'; '.join(CASES)}; got {sorted(unknown)}")
    comm = wb.comm.LocalCommunicator()
    rows_of_table = []
    for name in arguments.names:
        check(name)
        row: dict[str, Any] = {"loss": name, "embedding_size": EMBEDDING_SIZE}
        for rows in arguments.rows:
            batch, memory, times = Batch(rows), [], {"clip_loss": [], name: []}
            for subject in times:
                step(CASES[subject], batch)  # loads libraries, starts threads
            for _ in range(STEPS if rows < 16384 else 1):
                for subject, seconds in times.items():
                    start = time.perf_counter()
                    step(CASES[subject], batch)
                    seconds.append(time.perf_counter() - start)
                rise = rise_of_peak(comm, lambda name=name, batch=batch: step(CASES[name], batch))
                assert rise is not None
                memory.append(rise / 1e6)
            row[f"MB at {rows}"] = round(max(memory), 1)
            row[f"of CLIP's time at {rows}"] = round(median(times[name]) / median(times["clip_loss"]), 2)
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        rows_of_table.append(row)
    keep(RESULTS, rows_of_table, same_run=("loss",))


if __name__ == "__main__":
    main()
