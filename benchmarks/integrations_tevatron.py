"""Measure a step of Tevatron's retriever trainer on two processes, with its loss and with ours: time, and memory.

    export WHOLEBATCH_TEVATRON=folder WHOLEBATCH_GRAD_CACHE=folder   # checkouts: texttron/tevatron, luyug/GradCache
    .venv-ecosystem/bin/python benchmarks/integrations_tevatron.py   # a minute on two cores

A tiny encoder, 2048 queries in all with 3 passages each, in float32. Memory is the rise of rank 0's peak over that
before the first step. The time is the median of three steps after the first.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]

import tevatron_runs  # noqa: E402

from wholebatch.bench.records import about  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_tevatron.json"
ROWS, STEPS = 2048, 4
CHUNKS = ["--grad_cache", "--gc_q_chunk_size", "64", "--gc_p_chunk_size", "192"]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tevatron_runs.make_files(folder)
        make_texts(folder / "train.jsonl")
        rows = []
        for cached in (False, True):
            for whose in ("theirs", "ours"):
                launch(folder, whose, cached)
                rows.append(json.loads((folder / "result.json").read_text()))
                print(rows[-1], flush=True)
    RESULTS.write_text(json.dumps({"about": about(), "rows": rows}, indent=1) + "\n")


def make_texts(path: Path) -> None:
    chosen = random.Random(0)

    def passage() -> dict[str, str]:
        return {"docid": "", "title": "", "text": " ".join(chosen.choices(tevatron_runs.WORDS[5:], k=4))}

    with path.open("w") as file:
        for k in range(ROWS * STEPS):
            positive, negatives = [passage()], [passage(), passage()]
            row = {"query_id": str(k), "query": passage()["text"], "positive_passages": positive}
            file.write(json.dumps(row | {"negative_passages": negatives}) + "\n")


def launch(folder: Path, whose: str, cached: bool) -> None:
    packages = [tevatron_runs.folder_of("WHOLEBATCH_TEVATRON")]
    packages += [tevatron_runs.folder_of("WHOLEBATCH_GRAD_CACHE")] if whose == "theirs" else []
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, packages)])
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *torchrun, __file__, str(folder), whose, "cached" if cached else "plain"]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if run.returncode:
        raise SystemExit(run.stderr[-3000:])


def measure(folder: Path, whose: str, kind: str) -> None:
    """Train on this rank, and write the figures of rank 0."""
    if whose == "ours":
        from wholebatch.integrations import tevatron

        tevatron.install()
    from tevatron.retriever.driver import train
    from tevatron.retriever.gc_trainer import GradCacheTrainer
    from tevatron.retriever.trainer import TevatronTrainer

    times: list[float] = []
    peaks: list[float] = []

    def timed(cls: Any) -> None:
        made, original = cls.__init__, cls.training_step

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            made(self, *args, **kwargs)
            peaks.append(peak_mb())

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = original(self, *args, **kwargs)
            times.append(time.perf_counter() - start)
            peaks.append(peak_mb())
            return found

        cls.__init__, cls.training_step = init, step

    timed(GradCacheTrainer if kind == "cached" else TevatronTrainer)
    tevatron_runs.ROWS = ROWS
    rank = os.environ["RANK"]
    argv = tevatron_runs.arguments(folder, "plain", False, 2, f"{whose} {kind} {rank}")
    argv[argv.index("--max_steps") + 1] = str(STEPS)
    sys.argv = ["train", *argv, *(CHUNKS if kind == "cached" else [])]
    train.main()
    if rank == "0":
        found = {"loss": whose, "kind": kind, "added_mb": round(peaks[-1] - peaks[0])}
        (folder / "result.json").write_text(json.dumps(found | {"step_ms": round(1000 * median(times[1:]))}))


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(Path(sys.argv[1]), *sys.argv[2:])
    else:
        main()
