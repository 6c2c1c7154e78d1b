"""Time and memory of a training step inside other trainers: with their loss, and with ours in its place.

    .venv-ecosystem/bin/python benchmarks/integrations_steps.py transformers sentence_transformers
    .venv-vision/bin/python benchmarks/integrations_steps.py open_clip
    .venv-embedders/bin/python benchmarks/integrations_steps.py flag_embedding

Two need checkouts, of texttron/tevatron with luyug/GradCache, and of deepinsight/insightface:

    export WHOLEBATCH_GRAD_CACHE=folder WHOLEBATCH_TEVATRON=folder WHOLEBATCH_INSIGHTFACE=recognition/arcface_torch
    .venv-ecosystem/bin/python benchmarks/integrations_steps.py tevatron insightface

Each run is the framework's own trainer on two processes, with a tiny model, plain SGD and many rows, so that the loss
is a large part of the step. First, a run of each method gives its memory: the rise of a process's peak in the steps
after the second, beyond weights, gradients and the optimizer's state, which are there already. The weights at the end
of the methods that are exact are compared. Then the methods take turns in rounds for the time: that between two
optimizer steps, without the wait for data. (The runs for memory return each tensor's memory to the system, which takes
time.) A ratio is the median over the rounds. Results go to results/integrations_steps.json, with the load of the
machine: the number of processes that were running, these two included, as a median over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import runpy
import sys
import tempfile
import threading
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

import checkouts  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.optim import Optimizer  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook  # noqa: E402
from torch.utils.data import dataloader  # noqa: E402

from wholebatch import _measure  # noqa: E402
from wholebatch._base.third_party import version  # noqa: E402
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
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)
        fetch, trains = dataloader._BaseDataLoaderIter.__next__, threading.get_ident()

        def timed(loader: Any) -> Any:
            start = time.perf_counter()
            try:
                return fetch(loader)
            finally:
                if threading.get_ident() == trains:  # nobody waits for a thread that loads ahead
                    self.waited += time.perf_counter() - start

        dataloader._BaseDataLoaderIter.__next__ = timed  # type: ignore[method-assign]

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if not self.ends:
            self.start = flat(optimizer)
            self.weights = torch.empty_like(self.start)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        end = time.perf_counter()
        self.ends.append(end - self.waited)
        flat(optimizer, out=self.weights)
        if len(self.ends) == WARM_UP:
            self.before = _measure.reset_peak()
        self.waited += time.perf_counter() - end

    def figures(self) -> Figures:
        seconds = [after - before for before, after in zip(self.ends[WARM_UP - 1 :], self.ends[WARM_UP:], strict=False)]
        return Figures(seconds, _measure.peak() - self.before, self.start, self.weights)


def flat(optimizer: Optimizer, out: torch.Tensor | None = None) -> torch.Tensor:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return torch.cat([p.detach().flatten() for p in parameters], out=out)


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


def flag_embedding(method: str, port: int, folder: str, rows: int, steps: int) -> None:
    import flag_embedding_runs as runs
    from dual import as_launched

    from wholebatch.integrations.flag_embedding import main as ours

    as_launched(port)
    options, is_ours = METHODS["flag_embedding"][method].options
    runs.ROWS, runs.STEPS = rows, steps
    case = runs.Case(tuple(options), model="float32", cross="default" not in method)
    argv = runs.arguments(folder, case, 2, f"{folder}/{port}")
    if is_ours:
        ours(["-m", runs.PROGRAMS["base"], *argv])
    else:
        sys.argv = ["train", *argv]
        runpy.run_module(runs.PROGRAMS["base"], run_name="__main__", alter_sys=True)


def tevatron(method: str, port: int, folder: str, rows: int, steps: int) -> None:
    import tevatron_runs as runs
    from dual import as_launched

    as_launched(port)
    options, is_ours = METHODS["tevatron"][method].options
    runs.import_from(
        [runs.folder_of("WHOLEBATCH_TEVATRON"), None if is_ours else runs.folder_of("WHOLEBATCH_GRAD_CACHE")]
    )
    if is_ours:
        from wholebatch.integrations.tevatron import install

        install()
    from tevatron.retriever.driver import train

    runs.ROWS = rows
    argv = runs.arguments(Path(folder), "plain", False, 2, f"{port} {dist.get_rank()}")
    argv[argv.index("--max_steps") + 1] = str(steps)
    sys.argv = ["train", *argv, *options]
    train.main()


def insightface(method: str, port: int, folder: str, rows: int, steps: int) -> None:
    import insightface_runs as runs

    rate, variant = METHODS["insightface"][method].options
    runs.CLASSES, runs.EMBEDDING = CLASSES, EMBEDDING
    images = {"images": rows * steps, "num_image": rows * steps, "batch_size": rows // 2, "output": f"{folder}/{port}"}
    head = {"num_classes": CLASSES, "embedding_size": EMBEDDING, "sample_rate": rate}
    cfg = runs.CONFIG | images | head
    if dist.get_rank() == 0:
        Path(cfg["output"]).mkdir()
        runs.write_start(Path(cfg["output"]), 2, cfg, torch.float32)
    dist.barrier()
    runs._train(2, port, variant, cfg, torch.float32, False, None)


@dataclass
class Method:
    """Options of a run, whether the loss is ours, whether it is exact, and the method whose time is the unit.

    insightface has three losses, by their names in `insightface_runs`.
    """

    options: tuple[Any, bool | str]
    exact: bool = True
    unit: str = "ours"


CLASSES, EMBEDDING = 50_000, 256  # of insightface
_PLAIN, _CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
_GATHERED, _CHUNKS = {"gather_across_devices": True}, {"mini_batch_size": 256}
_EXACT = ["--local-loss", "--gather-with-grad"]
_GRAD_CACHE = ["--grad_cache", "--gc_q_chunk_size", "64", "--gc_p_chunk_size", "192"]
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
    "flag_embedding": {
        "theirs, default: local rows": Method(([], False), exact=False),
        # Its gradient is half of the true one: with twice the learning rate its weights are those of ours.
        "theirs, --negatives_cross_device True": Method((["--learning_rate", "0.04"], False)),
        "ours": Method(([], True)),
    },
    "tevatron": {
        "theirs": Method(([], False)),
        "ours": Method(([], True)),
        "theirs, --grad_cache": Method((_GRAD_CACHE, False), unit="ours, --grad_cache"),
        "ours, --grad_cache": Method((_GRAD_CACHE, True), unit="ours, --grad_cache"),
    },
    "insightface": {
        "theirs": Method((1.0, "theirs")),
        "ours": Method((1.0, "ours")),
        "theirs, sample_rate=0.1": Method((0.1, "theirs"), exact=False, unit="ours, sample_rate=0.1"),
        "ours, sample_rate=0.1": Method((0.1, "ours"), exact=False, unit="ours, sample_rate=0.1"),
        "ours, sample_rate=0.1, memory=2**24": Method((0.1, "ours, kept"), exact=False, unit="ours, sample_rate=0.1"),
    },
}
ROWS = {"flag_embedding": 2048, "tevatron": 2048, "insightface": 512}  # of both processes together; else 4096
BODIES: dict[str, Callable[[str, int, str, int, int], None]] = {
    "open_clip": open_clip,
    "sentence_transformers": sentence_transformers,
    "transformers": transformers,
    "flag_embedding": flag_embedding,
    "tevatron": tevatron,
    "insightface": insightface,
}
PACKAGES = {
    "open_clip": "open_clip_torch",
    "sentence_transformers": "sentence-transformers",
    "flag_embedding": "FlagEmbedding",
}


# Files that the runs of a framework read.


def write_files(framework: str, folder: Path, rows: int, steps: int) -> None:
    if framework == "open_clip":
        from open_clip_runs import make_data

        make_data(folder, rows, times=steps)
    elif framework == "sentence_transformers":
        from sentence_runs import encoder

        encoder(str(folder), size=64)
    elif framework == "flag_embedding":
        import flag_embedding_runs

        flag_embedding_runs.ROWS, flag_embedding_runs.STEPS = rows, steps
        flag_embedding_runs.make_files(folder)
    elif framework == "tevatron":
        import tevatron_runs

        tevatron_runs.make_files(folder)
        chosen = random.Random(0)

        def passage() -> dict[str, str]:
            return {"docid": "", "title": "", "text": " ".join(chosen.choices(tevatron_runs.WORDS[5:], k=4))}

        with (folder / "train.jsonl").open("w") as file:
            for k in range(rows * steps):
                positive, negatives = [passage()], [passage(), passage()]
                row = {"query_id": str(k), "query": passage()["text"], "positive_passages": positive}
                file.write(json.dumps(row | {"negative_passages": negatives}) + "\n")


def on_rank(
    framework: str, method: str, port: int, folder: str, rows: int, steps: int, for_memory: bool
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    if for_memory:
        _measure.map_each_tensor()
    watch = Watch()
    watch.install()
    with contextlib.redirect_stdout(io.StringIO()):  # their logs
        BODIES[framework](method, port, folder, rows, steps)
    return vars(watch.figures())


def measure(framework: str, rows: int, steps: int, rounds: int, folder: str) -> list[dict[str, Any]]:
    """Return a row for each method; raise if two exact ones end with other weights."""
    from dual import free_port

    def run(method: str, for_memory: bool = False) -> list[Figures]:
        body = partial(on_rank, framework, method, free_port(), folder, rows, WARM_UP + steps, for_memory)
        return [Figures(**of_rank) for of_rank in run_ranks(body, 2, timeout_s=600)]

    methods, loads = METHODS[framework], []
    first = {method: run(method, for_memory=True) for method in methods}
    weights = {method: torch.cat([of_rank.weights for of_rank in of_method]) for method, of_method in first.items()}
    moved = (weights["ours"] - torch.cat([of_rank.start for of_rank in first["ours"]])).norm()
    assert moved > 0, "nothing was trained"
    away = {method: ((end - weights["ours"]).norm() / moved).item() for method, end in weights.items()}
    for method, distance in away.items():
        if methods[method].exact and distance > ROUNDING:
            raise SystemExit(f"{framework}, {method}: ends {distance:.1e} of the way from ours")
    # A step takes as long as on the slower process; its memory is that of the process with most.
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method, of_rounds in seconds.items():
            of_ranks = zip(*(of_rank.seconds for of_rank in run(method)), strict=True)
            of_rounds.append(median(map(max, of_ranks)))
            loads.append(os.getloadavg()[0])
    rowset = []
    for method, of_rounds in seconds.items():
        unit = seconds[methods[method].unit]
        row = {
            "framework": framework,
            "method": method,
            "rows": rows,
            "milliseconds": 1e3 * median(of_rounds),
            "ratio": median(one / of_ours for one, of_ours in zip(of_rounds, unit, strict=True)),
            "megabytes": max(of_rank.bytes_ for of_rank in first[method]) / 2**20,
            "from_ours": away[method],
            "version": version_of(framework),
            "load": median(loads),
        }
        rowset.append(row)
        print(
            f"| {framework} | {method} | {row['milliseconds']:.0f} | {row['ratio']:.2f} | {row['megabytes']:.0f} "
            f"| {away[method]:.1e} |",
            flush=True,
        )
    return rowset


def version_of(framework: str) -> str | None:
    return checkouts.commit(framework) if framework in checkouts.NAMES else version(PACKAGES.get(framework, framework))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("frameworks", nargs="+", choices=[*METHODS])
    parser.add_argument("--rows", type=int, help="of both processes together")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each method")
    given = parser.parse_args()
    for framework in given.frameworks:
        rows = given.rows or ROWS.get(framework, 4096)
        with tempfile.TemporaryDirectory() as folder:
            write_files(framework, Path(folder), rows, WARM_UP + given.steps)  # once, before processes read them
            found = measure(framework, rows, given.steps, given.rounds, folder)
        keep(RESULTS, found, ["framework", "method", "rows"])


if __name__ == "__main__":
    main()
