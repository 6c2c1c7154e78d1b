"""`wholebatch train` on a million pictures in tar shards: time to the first step, memory, and the share of each part.

    .venv/bin/python benchmarks/million_rows.py make FOLDER --rows 1000000   # 100 shards, about 1 GB, some minutes
    .venv/bin/python benchmarks/million_rows.py run FOLDER

The pictures are made: 32 x 32, in color, as JPEG, each with a text of its own. `run` starts the program twice, without
and with the table of its places in the cache, for the time to the first step and the memory of the process. Then it
takes the parts of a step in this process: the wait for the batch, the loss (forward and backward, alone, on features of
the same size), the optimizer and the whole. A plain `DataLoader` over the same pictures, with as many workers, each
picture read by Pillow and batched as a tensor, takes turns with the program's own reading. Results go to
results/million_rows.json.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src")]

import wholebatch as wb  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402
from wholebatch_train.config import TrainConfig  # noqa: E402
from wholebatch_train.data.load import load_data  # noqa: E402
from wholebatch_train.data.open_table import open_table  # noqa: E402
from wholebatch_train.tasks.make import make_task  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "million_rows.json"
SIZE, IN_A_SHARD, BATCH, ROUNDS, STEPS = 32, 10_000, 1024, 3, 10


def write_shard(folder: Path, number: int, rows: int) -> None:
    """Write a shard of random smooth pictures, with their number in words as text."""
    rng = np.random.default_rng(number)
    with tarfile.open(folder / f"{number:06d}.tar", "w") as shard:
        for row in range(rows):
            coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            picture = io.BytesIO()
            coarse.resize((SIZE, SIZE), Image.Resampling.BILINEAR).save(picture, "JPEG")
            key, text = f"{number:06d}{row:06d}", f"picture {row} of shard {number}"
            for name, content in ((f"{key}.jpg", picture.getvalue()), (f"{key}.txt", text.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                shard.addfile(member, io.BytesIO(content))


def make(folder: Path, rows: int) -> None:
    """Write the shards, with both cores."""
    folder.mkdir(parents=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        parts = range(-(-rows // IN_A_SHARD))
        list(pool.map(write_shard, [folder] * len(parts), parts, [min(IN_A_SHARD, rows)] * len(parts)))


def start(folder: Path, cache: str, ranks: int) -> dict[str, float]:
    """Start the program for five steps; return seconds to the first one, and the largest memory of rank 0."""
    with tempfile.TemporaryDirectory() as runs:
        run = Path(runs) / "run"
        command = [sys.executable, "-m", "wholebatch", "train", "--data", str(folder), "--steps", "5",
                   "--ranks", str(ranks), "--run-folder", str(run)]  # fmt: skip
        environment = {**os.environ, "XDG_CACHE_HOME": cache, "PYTHONPATH": str(ROOT / "src")}
        began = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            assert process.stdout is not None
            first, lines = 0.0, []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("the first step"):
                    first = time.monotonic() - began
                    print(f"{first:.1f} s to the first step", flush=True)
        if process.returncode:
            raise SystemExit("".join(lines))
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    memory = max(value for row in metrics for name, value in row.items() if re.search("memory|rss", name))
    return {"seconds to the first step": first, "largest memory, bytes": memory}


class Plain(Dataset[Any]):
    """The pictures and texts of the shards, read as a first program would do it."""

    def __init__(self, places: list[tuple[str, int, int]], texts: list[str]) -> None:
        self.places, self.texts = places, texts

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.places)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, str]:
        """Return pixels and text."""
        path, offset, size = self.places[row]
        with open(path, "rb") as file:
            file.seek(offset)
            picture = Image.open(io.BytesIO(file.read(size))).convert("RGB")
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1), self.texts[row]


def parts_of_a_step(folder: Path, workers: int) -> dict[str, float]:
    """Return the seconds of each part of a step, and pictures per second of both ways of reading."""
    torch.manual_seed(0)
    asked = TrainConfig(data=str(folder), batch_size=BATCH, steps=10**6, workers=workers)
    config, data = load_data(asked, 1)
    task = make_task(config, data, torch.device("cpu"), rank=0, size=1)
    table = open_table(str(folder))
    rows = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))
    ours, theirs = [], []
    for round_, some in enumerate(rows[: ROUNDS * BATCH * (STEPS + 8)].chunk(ROUNDS)):  # new ones, as ours are
        ours.append(pictures_per_second(lambda step, first=round_ * 100: task._batches.at(first + step)))
        chosen = table.arrow.take(some.tolist())
        places = [(each["shard"], each["offset"], each["size"]) for each in chosen["image"].to_pylist()]
        plain = Plain(places, chosen["text"].to_pylist())
        loader = iter(DataLoader(plain, batch_size=BATCH, num_workers=workers))
        theirs.append(pictures_per_second(lambda _, batches=loader: next(batches)))
    seconds: dict[str, list[float]] = {"whole step": [], "wait for the batch": [], "optimizer": [], "loss alone": []}
    features = [normalize(torch.randn(BATCH, config.model.embedding_size), dim=-1).requires_grad_() for _ in range(2)]
    at = task._batches.at
    waited = 0.0

    def timed_batch(step: int) -> Any:
        nonlocal waited
        began = time.monotonic()
        batch = at(step)
        waited = time.monotonic() - began
        return batch

    task._batches.at = timed_batch
    for step in range(1000, 1000 + STEPS):
        began = time.monotonic()
        task.optimizers[0].zero_grad()
        task.add_gradients(step)
        ready = time.monotonic()
        task.optimizers[0].step()
        done = time.monotonic()
        wb.functional.clip_loss(*features, 14.3).backward()
        seconds["loss alone"].append(time.monotonic() - done)
        seconds["optimizer"].append(done - ready)
        seconds["wait for the batch"].append(waited)
        seconds["whole step"].append(done - began)
    return {
        **{f"{name}, seconds": median(values[2:]) for name, values in seconds.items()},
        "pictures per second, read": median(ours),
        "pictures per second, plain DataLoader": median(theirs),
        "ratio of reading": median(a / b for a, b in zip(ours, theirs, strict=True)),
    }


def pictures_per_second(batch: Any) -> float:
    """Return the rate of batches after the first four, which start the workers and fill their queues."""
    for step in range(4):
        batch(step)
    began = time.monotonic()
    for step in range(4, 4 + STEPS):
        batch(step)
    return BATCH * STEPS / (time.monotonic() - began)


def run(folder: Path, workers: int) -> None:
    """Measure, print and keep."""
    rows = []
    shards = len(list(folder.glob("*.tar")))
    with tempfile.TemporaryDirectory() as cache:
        for name in ("first start", "second start"):
            rows.append({"what": name, **start(folder, cache, 1)})
        rows.append({"what": "start on two ranks", **start(folder, cache, 2)})
        os.environ["XDG_CACHE_HOME"] = cache
        rows.append({"what": "parts of a step", "workers": workers, **parts_of_a_step(folder, workers)})
    for row in rows:
        print(row, flush=True)
    keep(RESULTS, [{"rows": shards * IN_A_SHARD, **row} for row in rows], ["rows", "what"])


def main() -> None:
    """Make the data, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["make", "run"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    if given.action == "make":
        make(given.folder, given.rows)
    else:
        run(given.folder, given.workers)


if __name__ == "__main__":
    main()
