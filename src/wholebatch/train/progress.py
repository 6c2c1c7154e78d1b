"""What rank 0 shows: a live bar in a terminal, plain lines elsewhere, and the report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from .config import TrainConfig
from .pairs import Pairs, Split
from .retrieval import KS

_LINE_EVERY = 10  # steps between two plain lines


class Progress:
    """Shows nothing by itself: what the other ranks use."""

    def show_folder(self, folder: Path) -> None:
        """Where the run's files will be."""

    def start(self, config: TrainConfig, pairs: Pairs, split: Split, *, size: int, done: int) -> None:
        """The data are loaded and training begins after `done` steps."""

    def step(self, metrics: dict[str, Any]) -> None:
        """A step is done."""

    def stop(self) -> None:
        """Leave the terminal as it was."""

    def show_how_to_resume(self, folder: Path) -> None:
        """The run was interrupted."""

    def report(self, folder: Path) -> None:
        """The run is finished."""


class ConsoleProgress(Progress):
    """A bar while training in a terminal; otherwise a line every few steps."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._recall = ""

    def start(self, config: TrainConfig, pairs: Pairs, split: Split, *, size: int, done: int) -> None:
        self._console.print(
            f"{len(pairs.images):,} images of {len(pairs):,} texts: {len(split.train):,} for training, "
            f"{len(split.validation):,} for validation, {len(split.test):,} for test\n"
            f"global batch {config.batch_size:,} on {size} process{'es' if size > 1 else ''}"
            + (f", going on after step {done}" if done else "")
            + (", starting again: there was no checkpoint yet" if config.resume is not None and not done else "")
        )
        self._among = len(split.validation)
        if self._console.is_terminal:
            self._bar = Bar(
                TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
                TimeRemainingColumn(), console=self._console,
            )  # fmt: skip
            self._bar.add_task("", total=config.steps, completed=done)
            self._bar.start()
        self._last = config.steps

    def step(self, metrics: dict[str, Any]) -> None:
        recall = ""
        if "validation" in metrics:
            recall = f", validation recall@1 {metrics['validation']['image_to_text']['recall@1']:.3f}"
            recall += f" among {self._among}"
        state = f"loss {metrics['loss']:.4f}"
        if self._bar is not None:
            self._recall = recall or self._recall  # the bar keeps the last one in sight
            self._bar.update(self._bar.task_ids[0], completed=metrics["step"], description=state + self._recall)
        elif metrics["step"] % _LINE_EVERY == 0 or metrics["step"] == self._last or "validation" in metrics:
            self._console.print(f"step {metrics['step']:4d}/{self._last}  {state}, {metrics['seconds']:.0f} s{recall}")

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show_folder(self, folder: Path) -> None:
        self._console.print(f"run folder: {folder}")

    def show_how_to_resume(self, folder: Path) -> None:
        self._console.print(f"go on from the last checkpoint with: wholebatch train --resume {folder}")

    def report(self, folder: Path) -> None:
        report = json.loads((folder / "report.json").read_text())
        table = Table(title=f"Retrieval among {report['test_texts']} texts never seen in training")
        table.add_column("")
        for k in KS:
            table.add_column(f"recall@{k}", justify="right")
        for label, key in (
            ("image -> text", "image_to_text"),
            ("text -> image", "text_to_image"),
            ("chance", "chance"),
        ):
            table.add_row(label, *(f"{report[key][f'recall@{k}']:.4f}" for k in KS))
        self._console.print(table)
        self._console.print(f"trained for {report['seconds']:.0f} s; pictures and checkpoint are in {folder}")
