"""One file per checkpoint: weights, optimizer, loss scale and random state as safetensors, replaced in one step.

The new file is written beside the old one and renamed over it, so a run that is killed at any moment leaves a complete
checkpoint. Its facts hold the id of the save, which a classifier's folder repeats, and the digests of the run's record
and of the steps in metrics.jsonl. A checkpoint is read and compared completely before anything changes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from wholebatch.app import Types, UserError, check_fields, parse_json, read_bounded, shown, sync_file, writing
from wholebatch.app.tensors import TensorFile, is_save_id, new_save_id, write_tensors

from ..ranks.sharding import as_in, whole_state
from .record import CONFIG, digests_of_run

FILE = "checkpoint.safetensors"
METRICS = "metrics.jsonl"
_NOTHING: Mapping[str, Tensor] = MappingProxyType({})
_MOST_METRICS_BYTES = 2**30
_FORMAT = "wholebatch-train-5"
_FACTS: Types = {
    "step": int, "seconds": (float, int), "torch": str, "save": str, "config": (str, type(None)),
    "metrics": (str, type(None)), "extensions": (str, type(None)),
    "data": (str, type(None)),
}  # fmt: skip


def save_checkpoint(
    folder: Path,
    state: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    seconds: float,
    scaler: Mapping[str, Tensor] = _NOTHING,
    save: str | None = None,
    metrics: str | None = None,
    writes: bool = True,
) -> None:
    """Write folder/checkpoint.safetensors: the state after `step` steps and `seconds` of training.

    With sharded weights all ranks call it, to gather them, and one `writes`. Of the optimizer the state is saved, not
    its settings. Other parts of the checkpoint repeat the id `save`; None: there are none. `metrics` is the digest of
    the first `step` lines of metrics.jsonl; None: it is computed from the file.
    """
    state = whole_state(state, kept=writes)
    optimizer_state = {i: whole_state(entry, kept=writes) for i, entry in optimizer.state_dict()["state"].items()}
    if not writes:
        return
    sync_file(folder / METRICS)  # the checkpoint holds its digest
    facts = {
        "step": step, "seconds": seconds, "torch": str(torch.__version__), "save": save or new_save_id(),
        **_digests(folder, step, metrics),
    }  # fmt: skip
    tensors = _tensors(state, optimizer_state, scaler)
    save_tensors(folder / FILE, tensors, {"format": _FORMAT, "facts": json.dumps(facts)})


def _tensors(
    state: Mapping[str, Tensor], optimizer: Mapping[int, Mapping[str, Tensor]], scaler: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in state.items()}
    for index, parameter_state in optimizer.items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in parameter_state.items()}
    tensors |= {f"scaler.{name}": value for name, value in scaler.items()}
    return tensors | {"rng.cpu": torch.get_rng_state()}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and fits the model."""

    facts: dict[str, Any]
    tensors: Mapping[str, Tensor]

    def part(self, prefix: str) -> dict[str, Tensor]:
        """Return the tensors whose names begin with this, by the rest of their names."""
        return {name.removeprefix(prefix): x for name, x in self.tensors.items() if name.startswith(prefix)}

    @property
    def scaler(self) -> dict[str, Tensor]:
        """The state of the loss's scale; {} if it has none."""
        return self.part("scaler.")

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model_state, states = self.part("model."), dict[int, dict[str, Tensor]]()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for key, x in self.part("optimizer.").items():
            index, name = key.split(".")
            p = parameters[int(index)]
            states.setdefault(int(index), {})[name] = as_in(x, p) if x.shape == p.shape else x
        model.load_state_dict({name: as_in(model_state[name], x) for name, x in model.state_dict().items()})
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        torch.set_rng_state(self.tensors["rng.cpu"])


def read_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int,
    scaler: Mapping[str, Tensor] = _NOTHING,
) -> Checkpoint:
    """Read the checkpoint of a run of `steps` steps, with a `scaler` state like this; change nothing."""
    path = folder / FILE
    with _reading(path), TensorFile(path) as file:
        facts = _facts(file)
        check_is_of_run(file, folder, _digests(folder, facts["step"]))
        if not 0 <= facts["step"] <= steps:
            raise UserError(f"{path} is of step {facts['step']}, expected 0 to {steps}, the steps of the run")
        expected = _expected(model, optimizer, scaler)
        specs = {name: (entry.shape, entry.dtype) for name, entry in file.entries.items()}
        check_fits(path, "this configuration's model", specs, expected)
        tensors = {name: file.read(name) for name in expected}
    try:
        torch.Generator().set_state(tensors["rng.cpu"])
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} has no state of torch's random generator in 'rng.cpu': {reason}") from error
    for name in (f"model.{name}" for name, p in model.named_parameters() if p.requires_grad):
        if not bool(tensors[name].isfinite().all()):  # a checkpoint is written of finite weights alone
            raise UserError(f"{path} has weights that are not finite in {name!r}; was it edited?")
    for name in (name for name in tensors if name.startswith("optimizer.")):
        x, most = tensors[name], facts["step"] if name.endswith(".step") else math.inf
        if not bool((x.isfinite() & ((x >= 0) | name.endswith(".exp_avg")) & (x <= most)).all()):
            raise UserError(f"{path} has no state of an optimizer in {name!r}; was it edited?")
    checkpoint = Checkpoint(facts, tensors)
    loss_scale = {name: x.item() for name, x in checkpoint.scaler.items()}
    if not all(math.isfinite(x) and (x > 0 if name == "scale" else x >= 0) for name, x in loss_scale.items()):
        raise UserError(f"{path} has no state of a loss scale in 'scaler': expected positive numbers, got {loss_scale}")
    return checkpoint


def _expected(
    model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of all tensors of a checkpoint; the optimizer's by a step of a copy without data."""
    groups = []
    for group in optimizer.param_groups:
        empty = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in group["params"]]
        parameters = [nn.Parameter(x, p.requires_grad) for x, p in zip(empty, group["params"], strict=True)]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        groups.append(group | {"params": parameters})
    make: Callable[..., torch.optim.Optimizer] = type(optimizer)
    copy = make(groups)
    copy.step()
    tensors = _tensors(model.state_dict(), copy.state_dict()["state"], scaler)
    return {name: (tuple(x.shape), x.dtype) for name, x in tensors.items()}


def last_step(folder: Path, *, recorded: int, checkpoint_every: int) -> int:
    """Return the step after which a run of `recorded` steps resumes: its checkpoint's, or 0 without a checkpoint."""
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
    with writing(repr(str(path))):
        write_tensors(path, tensors, metadata)


def _facts(file: TensorFile) -> dict[str, Any]:
    """Return the facts that a checkpoint holds beside its tensors, once they are checked."""
    if file.metadata.get("format") != _FORMAT:
        raise UserError(
            f"{str(file.path)!r} is no checkpoint of this version: its format is {shown(file.metadata.get('format'))}, "
            f"expected {_FORMAT!r}; start a new run, or resume this one with the version that began it"
        )
    source = f"the facts of the checkpoint {file.path}"
    facts = check_fields(parse_json(file.metadata.get("facts", "").encode(), source), source, _FACTS)
    if facts["step"] < 0 or facts["seconds"] < 0:
        raise UserError(f"{source} must not be negative, got step {facts['step']} and {facts['seconds']} seconds")
    if not is_save_id(facts["save"]):
        raise UserError(f"{source} name the save {shown(facts['save'])}, expected 32 hexadecimal digits")
    return facts


def _digests(folder: Path, step: int, metrics_digest: str | None = None) -> dict[str, str | None]:
    """Return the digests of the run's record and first steps; None for a file that is not there."""
    metrics = folder / METRICS
    with _reading(folder):
        if metrics_digest is None and metrics.exists():
            metrics_digest = hashlib.sha256(b"".join(first_lines(metrics, step))).hexdigest()
        return digests_of_run(folder, step) | {"metrics": metrics_digest}


def check_is_of_run(
    file: TensorFile, folder: Path, digests: Mapping[str, str | None] | None = None
) -> Mapping[str, Any]:
    """Return the facts of weights or a checkpoint; UserError unless they have these digests. None: those of the run."""
    kind, written = ("checkpoint", _facts(file)) if file.path.name == FILE else ("weights", file.metadata)
    for name, digest in (digests or digests_of_run(folder)).items():
        if written.get(name) != digest:
            changed = folder / (METRICS if name == "metrics" else CONFIG)
            raise UserError(
                f"{changed} is not the file that the {kind} {file.path.name} was written with; was it edited, or "
                "copied from another run?"
            )
    return written


def check_fits(path: Path, model: str, shapes: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise UserError unless the tensors of a file are of these shapes."""
    if shapes != expected:
        differing = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise UserError(
            f"{path} does not fit {model}: {len(differing)} tensors are missing, unknown or of another shape, "
            f"{differing[0]} among them; was the run folder edited?"
        )


def first_lines(metrics: Path, count: int | None) -> list[bytes]:
    return read_bounded(metrics, _MOST_METRICS_BYTES).splitlines(keepends=True)[:count]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an error of a file or of the file system into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {str(path)!r}; the run ended before its first one") from error
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}") from error
    except ValueError as error:
        raise UserError(str(error)) from error
