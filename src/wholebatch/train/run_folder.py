"""What a run leaves behind, all of it written by rank 0.

config.json              the configuration, read back by --resume
metrics.jsonl            one line per step
checkpoint.safetensors   weights, optimiser and random state after the last checkpointed step
model.safetensors        the final weights alone
report.json              recall on texts never seen in training, beside chance
curves.png               loss and validation recall over the steps
retrieval.png            held-out images beside the five texts that the model finds most similar
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .checkpoint import save_tensors
from .config import TrainConfig
from .errors import UserError
from .pairs import Pairs, Split
from .pictures import draw_curves, draw_retrieval
from .retrieval import KS, both_ways


class RunFolder:
    """A folder that belongs to one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._metrics = path / "metrics.jsonl"

    @classmethod
    def create(cls, path: Path, config: TrainConfig) -> RunFolder:
        """A new folder with the configuration in it; refuses one that holds a run already."""
        if (path / "config.json").exists():
            raise UserError(
                f"{str(path)!r} holds a run already; go on with --resume {path}, or choose another --run-folder"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.json").write_text(config.to_json() + "\n")
        except OSError as error:
            raise UserError(f"the run folder {str(path)!r} cannot be written: {error.strerror or error}") from error
        return cls(path)

    @classmethod
    def reopen(cls, path: Path, *, step: int) -> RunFolder:
        """The folder of a run that goes on after `step`; later lines of metrics.jsonl are dropped, to come again."""
        folder = cls(path)
        kept = [line for line in folder.metrics() if line["step"] <= step]
        if [line["step"] for line in kept] != list(range(1, step + 1)):
            raise UserError(f"{folder._metrics} does not hold the steps 1 to {step} of the checkpoint; was it edited?")
        partial = folder._metrics.with_suffix(".partial")
        try:
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(folder._metrics)
        except OSError as error:
            raise UserError(f"the run folder {str(path)!r} cannot be written: {error.strerror or error}") from error
        return folder

    def append(self, metrics: dict[str, Any]) -> None:
        """Add a line to metrics.jsonl."""
        with self._metrics.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All whole lines of metrics.jsonl; a last line that a kill cut short is left out."""
        lines = self._metrics.read_text().splitlines() if self._metrics.exists() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                if number < len(lines):
                    raise UserError(f"{self._metrics}, line {number}: not JSON ({error})") from error
        return rows

    def finish(
        self,
        encoder: nn.Module,
        pairs: Pairs,
        split: Split,
        image_features: Tensor,
        text_features: Tensor,
        seconds: float,
    ) -> None:
        """Final weights, report and pictures."""
        save_tensors(self.path / "model.safetensors", dict(encoder.state_dict()), {})
        report = {
            "test_texts": len(split.test),
            "seconds": round(seconds, 1),
            "chance": {f"recall@{k}": min(1.0, k / len(split.test)) for k in KS},
            **both_ways(image_features, text_features),
        }
        (self.path / "report.json").write_text(json.dumps(report, indent=2) + "\n")
        draw_curves(self.metrics(), self.path / "curves.png")
        draw_retrieval(pairs, split.test, image_features, text_features, self.path / "retrieval.png")


def read_config(path: Path) -> TrainConfig:
    """The configuration of the run in `path`."""
    file = path / "config.json"
    try:
        text = file.read_text()
    except OSError as error:
        raise UserError(
            f"--resume {path}: {str(file)!r} cannot be read ({error.strerror}); is it a run folder?"
        ) from error
    return TrainConfig.from_json(text, file)
