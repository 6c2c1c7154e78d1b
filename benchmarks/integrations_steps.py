"""Time and memory of a training step inside other trainers: with their loss, and with ours in its place.

    .venv-ecosystem/bin/python benchmarks/integrations_steps.py transformers sentence_transformers
    .venv-vision/bin/python benchmarks/integrations_steps.py open_clip

Each run is the framework's own trainer on two processes, with a tiny model, plain SGD and many rows, so that the loss
is a large part of the step. The methods of a framework take turns. A step's time is that between two optimizer steps,
without the wait for data; its memory is the rise of a process's peak after the second step. First the weights of the
methods that are exact are compared. Results go to results/integrations_steps.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "ecosystem"), str(ROOT / "tests"), str(ROOT / "src")]
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402
from torch.utils.data import dataloader  # noqa: E402

from wholebatch import _measure  # noqa: E402
from wholebatch._third_party import version  # noqa: E402
from wholebatch.bench.records import keep  # noqa: E402
from wholebatch.testing import run_ranks  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "integrations_steps.json"
WARM_UP, ROUNDING = 2, 1e-3  # steps before the measured ones; of the distance moved, in float32


@dataclass
class Figures:
    """The figures of a run in one process: its steps, its memory, and its weights before and after."""

    seconds: list[float]
    bytes_: int
    start: torch.Tensor
    weights: torch.Tensor


class Watch:
    """Watches the optimizer steps of a trainer in this process, and its waits for data."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.waited, self.before = 0.0, 0
        self.start = self.weights = torch.empty(0)

    def install(self) -> None:
        _measure.map_each_tensor()
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        fetch = dataloader._BaseDataLoaderIter.__next__

        def timed(loader: Any) -> Any:
            start = time.perf_counter()
            try:
                return fetch(loader)
            finally:
                self.waited += time.perf_counter() - start

        dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.ends:
            self.start = flat(optimizer)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self.ends.append(time.perf_counter() - self.waited)
        self.weights = flat(optimizer)
        if len(self.ends) == WARM_UP:
            self.before = _measure.reset_peak()
            self.ends[-1] = time.perf_counter() - self.waited

    def figures(self) -> Figures:
        seconds = [after - before for before, after in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:], strict=False)]
        return Figures(seconds, _measure.peak() - self.before, self.start, self.weights)


def flat(optimizer: Optimizer) -> torch.Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([p.detach().flatten() for p in parameters])


# The frameworks: each has a function that trains in a process, one of two, by one of its methods.


def open_clip(method: str, port: int, folder: str, rows: int, steps: int) -> None:
    from open_clip_runs import train_rank

    options, ours = METHODS["open_clip"][method].options
    argv = [
        "--train-data", f"{folder}/pairs.csv", "--dataset-type", "csv", "--aug-cfg", "scale=(1.0,1.0)",
        "--model", "tiny-vit", "--batch-size", str(rows // 2), "--epochs", "1", "--workers", "0", "--precision", "fp32",
        "--device", "cpu", "--warmup", "0", "--lr", "1e-3", "--lr-scheduler", "const", "--opt", "timm/momentum",
        "--momentum", "0", "--wd", "0", "--logs", folder, "--name", f"{method}-{time.time()}", "--save-frequency", "0",
        *options,
    ]  # fmt: skip
    train_rank(2, port, folder, argv, ours)


def sentence_transformers(method: str, port: int, folder: str, rows: int, steps: int) -> None:
    from dual import as_launched
    from sentence_runs import encoder, texts, trained
    from sentence_transformers.sentence_transformer import losses as theirs

    from wholebatch.integrations import sentence_transformers as ours

    as_launched(port)
    (name, settings), is_ours = METHODS["sentence_transformers"][method].options
    model = encoder(folder, size=64).float()
    loss = getattr(ours if is_ours else theirs, name)(model, **settings)
    data = texts(rows * steps, 2)
    trained(model, loss, data, 2, per_device_train_batch_size=rows // 2, max_steps=steps)


def transformers(method: str, port: int, _folder: str, rows: int, steps: int) -> None:
    from dual import as_launched
    from test_transformers import PicturesAndTexts, clip_model
    from transformers import Trainer, TrainingArguments

    from wholebatch.integrations.transformers import WholeBatchTrainerMixin

    class ContrastiveTrainer(WholeBatchTrainerMixin, Trainer):
        pass

    class Theirs(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(model, inputs | {"return_loss": True}, *args, **kwargs)

    as_launched(port)
    settings, is_ours = METHODS["transformers"][method].options
    with tempfile.TemporaryDirectory() as out:
        args = TrainingArguments(
            out, per_device_train_batch_size=rows // 2, max_steps=steps, optim="sgd", learning_rate=0.1,
            max_grad_norm=0.0, lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, remove_unused_columns=False, ddp_backend="gloo",
            ddp_find_unused_parameters=False,
        )  # fmt: skip
        data = PicturesAndTexts(rows * steps)
        data.images = data.images.float()
        make = ContrastiveTrainer if is_ours else Theirs
        make(clip_model().float(), args, train_dataset=data, **settings).train()


@dataclass
class Method:
    """Options of a run, whether the loss is ours, and whether it is exact."""

    options: tuple[Any, bool]
    exact: bool = True


_PLAIN, _CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
_GATHERED, _CHUNKS = {"gather_across_devices": True}, {"mini_batch_size": 256}
_EXACT = ["--local-loss", "--gather-with-grad"]
METHODS: dict[str, dict[str, Method]] = {
    "open_clip": {
        "theirs, default flags": Method(([], False), exact=False),
        "theirs, --local-loss --gather-with-grad": Method((_EXACT, False)),
        "ours": Method(([], True)),
        "ours, --wholebatch-chunk-size 256": Method((["--wholebatch-chunk-size", "256"], True)),
    },
    "sentence_transformers": {
        "theirs, default: local rows": Method(((_PLAIN, {}), False), exact=False),
        "theirs, gather_across_devices=True": Method(((_PLAIN, _GATHERED), False)),
        "ours": Method(((_PLAIN, {}), True)),
        "theirs, cached, gathered, 256 rows": Method(((_CACHED, _GATHERED | _CHUNKS), False)),
        "ours, cached, 256 rows": Method(((_CACHED, _CHUNKS), True)),
    },
    "transformers": {
        "theirs, CLIPModel's loss: local rows": Method(({}, False), exact=False),
        "ours": Method(({}, True)),
        "ours, chunk_size=256": Method(({"chunk_size": 256}, True)),
    },
}
BODIES: dict[str, Callable[[str, int, str, int, int], None]] = {
    "open_clip": open_clip,
    "sentence_transformers": sentence_transformers,
    "transformers": transformers,
}
PACKAGES = {"open_clip": "open_clip_torch", "sentence_transformers": "sentence-transformers"}


def on_rank(framework: str, method: str, port: int, folder: str, rows: int, steps: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    watch = Watch()
    watch.install()
    BODIES[framework](method, port, folder, rows, steps)
    return vars(watch.figures())


def measure(framework: str, rows: int, steps: int, rounds: int, folder: str) -> list[dict[str, Any]]:
    """Return a row for each method; raise if two exact ones end with other weights."""
    from dual import free_port

    methods = METHODS[framework]
    found: dict[str, list[list[Figures]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, runs in found.items():
            body = partial(on_rank, framework, method, free_port(), folder, rows, WARM_UP + steps)
            runs.append([Figures(**of_rank) for of_rank in run_ranks(body, 2, timeout_s=600)])
    first = found["ours"][0][0]
    moved = (first.weights - first.start).norm()
    rowset = []
    for method, runs in found.items():
        distance = ((runs[0][0].weights - first.weights).norm() / moved).item()
        if methods[method].exact and distance > ROUNDING:
            raise SystemExit(f"{framework}, {method}: ends {distance:.1e} of the way from ours")
        # A step takes as long as on the slower process; its memory is that of the process with most.
        seconds = [max(pair) for run in runs for pair in zip(*(of_rank.seconds for of_rank in run), strict=True)]
        rowset.append(
            {
                "framework": framework,
                "method": method,
                "rows": rows,
                "milliseconds": 1e3 * median(seconds),
                "megabytes": median(max(of_rank.bytes_ for of_rank in run) for run in runs) / 2**20,
                "from_ours": distance,
                "version": version(PACKAGES.get(framework, framework)),
            }
        )
    ours = next(row for row in rowset if row["method"] == "ours")
    for row in rowset:
        row["ratio"] = row["milliseconds"] / ours["milliseconds"]
        print(
            f"| {framework} | {row['method']} | {row['milliseconds']:.0f} | {row['ratio']:.2f} "
            f"| {row['megabytes']:.0f} | {row['from_ours']:.1e} |",
            flush=True,
        )
    return rowset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=[*METHODS])
    parser.add_argument("--rows", type=int, default=4096, help="of both processes together")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each method")
    given = parser.parse_args()
    for framework in given.frameworks:
        with tempfile.TemporaryDirectory() as folder:
            if framework == "open_clip":
                from open_clip_runs import make_data

                make_data(Path(folder), given.rows, times=WARM_UP + given.steps)
            elif framework == "sentence_transformers":
                from sentence_runs import encoder

                encoder(folder, size=64)  # written once, before processes read it
            rows = measure(framework, given.rows, given.steps, given.rounds, folder)
        keep(RESULTS, rows, ["framework", "method", "rows"])


if __name__ == "__main__":
    main()
