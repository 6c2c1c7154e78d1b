"""The planner against measurements: memory and time of settings at which its rates were not measured.

    python benchmarks/plan.py

Rates come from small batches (`wholebatch.planning.calibrate`: d = 16, 64, 256, 1024, at most 3840 rows, ranks that do
not communicate). The settings here have other widths, larger batches, all exchanges, 1, 2 and 4 ranks, half precision,
samples of classes and gradient caching. Each round calibrates again and then runs every setting; figures are medians of
the rounds, so that a busy moment of the machine affects predictions and measurements equally. Writes results/plan.json
and the table of docs/planning.md.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch._launch.processes import run_processes
from wholebatch._measure import map_each_tensor, rise_of_peak, seconds_of, threads_of_a_rank
from wholebatch.bench.records import keep
from wholebatch.planning.check import check, rates_here
from wholebatch.planning.rates import Rates
from wholebatch.planning.shapes import ExchangeUsed, Shapes
from wholebatch.planning.sizes import LossName

HERE = Path(__file__).parent
RESULTS, PAGE, MARK = HERE / "results" / "plan.json", HERE.parent / "docs" / "planning.md", "<!-- plan -->"
ROUNDS, PATIENCE_S = 3, 1000.0
WIDTH, LAYERS = 1024, 6  # of the encoders that are cached


@dataclass(frozen=True)
class Case:
    """A setting of a loss, or, with a chunk, of two encoders and CLIP's loss."""

    loss: LossName
    ranks: int
    batch_size: int
    embedding_size: int
    exchange: ExchangeUsed = "gather"
    kept_size: int = 0
    classes: int = 0
    sample_rate: float = 1.0
    chunk_size: int = 0
    kept_graphs: int = 0
    dtype: str = "float32"

    def shapes(self) -> Shapes:
        sizes = (self.batch_size, self.embedding_size, self.ranks, getattr(torch, self.dtype))
        return Shapes(self.loss, *sizes, classes=self.classes, sample_rate=self.sample_rate)

    def label(self) -> str:
        parts = [self.loss, f"B = {self.batch_size}", f"d = {self.embedding_size}"]
        parts += [f"{self.classes:,} classes"] if self.classes else []
        parts += [f"{self.sample_rate:.0%} of them"] if self.sample_rate < 1 else []
        parts += [self.exchange] if self.ranks > 1 and not self.classes else []
        parts += [f"kept, {self.kept_size} B"] if self.kept_size else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [f"GradCache, chunks of {self.chunk_size}, {self.kept_graphs} kept"] if self.chunk_size else []
        return ", ".join(parts)


CASES = (
    Case("clip", 1, 7000, 448),
    Case("info_nce", 1, 4500, 900, kept_size=4),
    Case("nt_xent", 1, 3200, 288, kept_size=2),
    Case("partial_fc", 1, 1800, 320, classes=70_000),
    Case("clip", 1, 3600, 192, chunk_size=600),
    Case("clip", 1, 3600, 192, chunk_size=300, kept_graphs=10),
    Case("clip", 2, 7200, 448, kept_size=2),
    Case("siglip", 2, 6800, 384),
    Case("sup_con", 2, 9000, 224, "ring"),
    Case("partial_fc", 2, 1300, 640, classes=150_000, sample_rate=0.1),
    Case("clip", 4, 5600, 768, "ring"),
    Case("info_nce", 4, 8000, 192, "ring", kept_size=2),
    Case("siglip", 4, 7600, 144, "ring"),
    Case("nt_xent", 4, 2800, 512),
    Case("clip", 2, 5500, 576, dtype="bfloat16"),
    Case("partial_fc", 2, 1700, 384, classes=90_000, dtype="bfloat16"),
)


def tower(dim: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, dim))


def cached(case: Case, rates: Rates) -> tuple[int, float]:
    """Return the planned bytes and seconds."""
    weights = LAYERS * (WIDTH + 1) * WIDTH + (WIDTH + 1) * case.embedding_size
    found = wb.plan(
        batch_size=case.batch_size,
        embedding_size=case.embedding_size,
        gradient_bytes=4 * 2 * weights,
        encoder_bytes=4 * 2 * LAYERS * WIDTH,  # the inputs of each Linear and each GELU
        encoder_flops=2.0 * 2 * weights,
        chunk_size=case.chunk_size,
        keep_graphs=case.kept_graphs,
        rates=rates,
    )
    option = next(option for option in found.options if option.chunk_size and option.memory == "flat")
    return option.peak, option.seconds


def run_cached(case: Case, what: str) -> float | int | None:
    """Return the seconds, or the rise of the peak."""
    if what == "memory":
        map_each_tensor()
    torch.set_num_threads(threads_of_a_rank(1))
    torch.manual_seed(0)
    comm, encoders, loss = (
        wb.comm.LocalCommunicator(),
        [tower(case.embedding_size), tower(case.embedding_size)],
        wb.CLIPLoss(memory="flat"),
    )
    inputs = [torch.randn(case.batch_size, WIDTH) for _ in encoders]

    def of_features(x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = loss(normalize(x, dim=1), normalize(y, dim=1), 14.3)
        return found

    cache = wb.GradCache(encoders, case.chunk_size, of_features, keep_graphs=case.kept_graphs)

    def step() -> None:
        cache(*inputs)

    def forget() -> None:
        for encoder in encoders:
            encoder.zero_grad()

    step()
    if what == "memory":
        forget()
        return rise_of_peak(comm, step)
    took = []
    for _ in range(3):
        forget()
        took.append(seconds_of(comm, step))
    return median(took)


def measure() -> list[dict[str, Any]]:
    found: dict[Case, list[tuple[float, ...]]] = defaultdict(list)
    for number in range(ROUNDS):
        for ranks, dtype in sorted({(case.ranks, case.dtype) for case in CASES}):
            cases = [case for case in CASES if (case.ranks, case.dtype) == (ranks, dtype)]
            losses = tuple(dict.fromkeys(case.loss for case in cases))
            rates = rates_here(losses, ranks, dtype=getattr(torch, dtype), device="cpu")
            for case in cases:
                if case.chunk_size:
                    predicted_bytes, predicted = cached(case, rates)
                    seconds, rise = (
                        run_processes(run_cached, 1, case, what, timeout_s=PATIENCE_S)[0] for what in ("time", "memory")
                    )
                else:
                    shapes = case.shapes()
                    memory = shapes.memory_for(case.kept_size) if case.kept_size else "flat"
                    of = check(shapes, case.exchange, memory, rates, within_s=PATIENCE_S)
                    predicted_bytes, predicted, seconds, rise = (
                        of.predicted_bytes, of.predicted_seconds, of.seconds, of.bytes
                    )  # fmt: skip
                assert rise is not None
                found[case].append((predicted_bytes, rise, predicted, seconds))
                print(
                    f"round {number + 1}, {ranks} ranks, {case.label()}: {predicted_bytes / 1e6:.1f} MB, measured "
                    f"{rise / 1e6:.1f}; {predicted:.3f} s, measured {seconds:.3f}",
                    flush=True,
                )
    return [_row(case, found[case]) for case in CASES]


def _row(case: Case, rounds: list[tuple[float, ...]]) -> dict[str, Any]:
    predicted_bytes, rise, predicted, seconds = (median(of) for of in zip(*rounds, strict=True))
    return {
        "setting": case.label(),
        **asdict(case),
        "predicted_mb": round(predicted_bytes / 1e6, 2),
        "measured_mb": round(rise / 1e6, 2),
        "error_of_memory": round(predicted_bytes / rise - 1, 4),
        "predicted_s": round(predicted, 4),
        "measured_s": round(seconds, 4),
        "error_of_time": round(predicted / seconds - 1, 4),
        "rounds_s": [[round(of[2], 4), round(of[3], 4)] for of in rounds],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| ranks | setting | memory | measured | error | time | measured | error |",
        "|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        lines.append(
            f"| {row['ranks']} | {row['setting']} | {row['predicted_mb']:.1f} MB | {row['measured_mb']:.1f} MB | "
            f"{row['error_of_memory']:+.1%} | {row['predicted_s']:.2f} s | {row['measured_s']:.2f} s | "
            f"{row['error_of_time']:+.0%} |"
        )
    return "\n".join(lines)


def main() -> None:
    rows = measure()
    keep(RESULTS, rows, same_run=("ranks",))
    shown = table(rows)
    print(shown)
    if PAGE.exists():
        before, _, rest = PAGE.read_text().partition(MARK)
        _, _, after = rest.partition(MARK)
        PAGE.write_text(f"{before}{MARK}\n\n{shown}\n\n{MARK}{after}")


if __name__ == "__main__":
    main()
