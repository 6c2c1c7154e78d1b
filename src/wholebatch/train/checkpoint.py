"""One file per checkpoint: weights, optimizer and random state as safetensors, replaced in one step.

The new file is written beside the old one and renamed over it, so a run that is killed at any moment leaves a whole
checkpoint. Its facts name the save, which a classifier's folder beside it names, too, and the digests of config.json
and of the steps in metrics.jsonl. All of it is read and compared before anything is changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._bounded_json import Types, check_fields, parse_json
from .._files import read_bounded, sync_file
from .._settings import shown
from .._tensor_file import TensorFile, is_save_id, new_save_id, write_tensors
from .._user_error import UserError
from .all_ranks import on_all_ranks

FILE = "checkpoint.safetensors"
CONFIG = "config.json"
METRICS = "metrics.jsonl"
MOST_CONFIG_BYTES = 2**20
_MOST_METRICS_BYTES = 2**30
_FORMAT = "wholebatch-train-3"
_FACTS: Types = {
    "step": int, "seconds": (float, int), "torch": str, "save": str, "config": (str, type(None)),
    "metrics": (str, type(None)),
}  # fmt: skip


def save_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    seconds: float,
    save: str | None = None,
) -> None:
    """Write folder/checkpoint.safetensors: the model's state after `step` steps and `seconds` of training.

    `save` is the id that other parts of the checkpoint name; None: there are none.
    """
    sync_file(folder / METRICS)  # whose digest the checkpoint holds
    facts = {
        "step": step, "seconds": seconds, "torch": str(torch.__version__), "save": save or new_save_id(),
        **_digests(folder, step),
    }  # fmt: skip
    tensors = _tensors(state, optimizer.state_dict()["state"])
    save_tensors(folder / FILE, tensors, {"format": _FORMAT, "facts": json.dumps(facts)})


def _tensors(state: Mapping[str, Tensor], of_optimizer: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in state.items()}
    for index, of_parameter in of_optimizer.items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in of_parameter.items()}
    return tensors | {"rng.cpu": torch.get_rng_state()}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and fits."""

    facts: dict[str, Any]
    tensors: Mapping[str, Tensor]

    def put(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put model, optimizer and random state where they were."""
        of_model = {name.removeprefix("model."): x for name, x in self.tensors.items() if name.startswith("model.")}
        state: dict[int, dict[str, Tensor]] = {}
        for key, x in self.tensors.items():
            if key.startswith("optimizer."):
                _, index, name = key.split(".")
                state.setdefault(int(index), {})[name] = x
        model.load_state_dict(of_model)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(self.tensors["rng.cpu"])


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> dict[str, Any]:
    """Put model, optimizer and random state where `save_checkpoint` found them; returns its facts. All ranks."""
    found, _ = on_all_ranks("resume", lambda: read_checkpoint(folder, model, optimizer, steps=steps))
    found.put(model, optimizer)
    return found.facts


def read_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int) -> Checkpoint:
    """Read the checkpoint of a run of `steps` steps, and change nothing.

    Raises:
        UserError: if a bit of it has changed, or it is not this run's or this model's.
    """
    path = folder / FILE
    with _reading(path), TensorFile(path) as file:
        facts = _facts(file)
        if not 0 <= facts["step"] <= steps:
            raise UserError(f"{path} is of step {facts['step']}, expected 0 to {steps}, the steps of the run")
        for name, digest in _digests(folder, facts["step"]).items():
            if facts[name] != digest:
                of = {"config": CONFIG, "metrics": METRICS}[name]
                raise UserError(
                    f"{folder / of} is not the file that the checkpoint {FILE} was written with; was it edited, or "
                    "copied from another run?"
                )
        expected = _expected(model, optimizer)
        found = {name: (entry.shape, entry.dtype) for name, entry in file.entries.items()}
        if found != expected:
            differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
            raise UserError(
                f"{path} does not fit this configuration's model: {len(differing)} tensors are missing, unknown "
                f"or of another shape, {differing[0]} among them; was the run folder edited?"
            )
        tensors = {name: file.read(name) for name in expected}
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise UserError(f"{path} has no state of torch's random generator in 'rng.cpu': {why}") from error
    return Checkpoint(facts, tensors)


def _expected(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of all tensors of a checkpoint. The optimizer's are those of its like on parameters without data
    that has made a step.
    """
    groups = []
    for group in optimizer.param_groups:
        parameters = [nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in group["params"]]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        groups.append(group | {"params": parameters})
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    like = make(groups)
    like.step()
    tensors = _tensors(model.state_dict(), like.state_dict()["state"])
    return {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}


def last_step(folder: Path, *, recorded: int, checkpoint_every: int) -> int:
    """The step that a run of `recorded` steps goes on after: its checkpoint's, or 0 if it ended before any."""
    path = folder / FILE
    if path.exists() or path.is_symlink():
        with _reading(path), TensorFile(path) as file:
            step = int(_facts(file)["step"])
        if step > recorded:
            raise UserError(
                f"{folder / METRICS} does not hold the steps 1 to {step} of the checkpoint {FILE}, but {recorded}; was "
                "it edited?"
            )
        return step
    if recorded > checkpoint_every:
        raise UserError(
            f"there is no checkpoint {str(path)!r}, though the run has had {recorded} steps; was it removed?"
        )
    return 0


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file beside `path` and rename it over `path`."""
    try:
        write_tensors(path, tensors, metadata)
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be written: {error}") from error


def _facts(file: TensorFile) -> dict[str, Any]:
    """What a checkpoint says of itself."""
    if file.metadata.get("format") != _FORMAT:
        found = shown(file.metadata.get("format"))
        raise UserError(f"{str(file.path)!r} is not a checkpoint of this program: its format is {found}")
    what = f"the facts of the checkpoint {file.path}"
    facts = check_fields(parse_json(file.metadata.get("facts", "").encode(), what), what, _FACTS)
    if facts["step"] < 0 or facts["seconds"] < 0:
        raise UserError(f"{what} must not be negative, got step {facts['step']} and {facts['seconds']} seconds")
    if not is_save_id(facts["save"]):
        raise UserError(f"{what} name the save {shown(facts['save'])}, expected 32 hexadecimal digits")
    return facts


def _digests(folder: Path, step: int) -> dict[str, str | None]:
    """Of the run's configuration and of its first steps, where there are such files."""
    config, metrics = folder / CONFIG, folder / METRICS
    found: dict[str, str | None] = {"config": None, "metrics": None}
    with _reading(folder):
        if config.exists():
            found["config"] = hashlib.sha256(read_bounded(config, MOST_CONFIG_BYTES)).hexdigest()
        if metrics.exists():
            found["metrics"] = hashlib.sha256(b"".join(first_lines(metrics, step))).hexdigest()
    return found


def first_lines(metrics: Path, count: int | None) -> list[bytes]:
    """The first lines of metrics.jsonl, or all."""
    return read_bounded(metrics, _MOST_METRICS_BYTES).splitlines(keepends=True)[:count]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what a file or the file system refuses into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {str(path)!r}; the run ended before its first one") from error
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
