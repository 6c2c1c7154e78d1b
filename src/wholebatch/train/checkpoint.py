"""One file per checkpoint: weights, optimiser and random state as safetensors, replaced in one step.

The new file is written beside the old one and renamed over it, so a run that is killed at any moment leaves a whole
checkpoint. Safetensors holds tensors and strings only: loading a file from elsewhere runs none of its content.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._user_error import UserError

FILE = "checkpoint.safetensors"
_FORMAT = "wholebatch-train-2"


def save_checkpoint(
    folder: Path, state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer, *, step: int, seconds: float
) -> None:
    """Write folder/checkpoint.safetensors: the model's state after `step` steps and `seconds` of training."""
    facts = {"step": step, "seconds": seconds, "torch": torch.__version__}
    save_tensors(folder / FILE, _tensors(state, optimizer), {"format": _FORMAT, "facts": json.dumps(facts)})


def _tensors(state: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {f"model.{name}": value for name, value in state.items()}
    for index, of_parameter in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in of_parameter.items()}
    return tensors | {"rng.cpu": torch.get_rng_state()}


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put model, optimizer and random state where `save_checkpoint` found them; returns its facts."""
    tensors, facts = _read(folder / FILE, with_tensors=True)
    _create_state(model, optimizer)
    expected = {name: (value.shape, value.dtype) for name, value in _tensors(model.state_dict(), optimizer).items()}
    found = {name: (value.shape, value.dtype) for name, value in tensors.items()}
    if found != expected:
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        raise UserError(
            f"{folder / FILE} does not fit this configuration's model: {len(differing)} tensors are missing, unknown "
            f"or of another shape, {differing[0]} among them; was the run folder edited?"
        )
    model.load_state_dict(
        {name.removeprefix("model."): tensors[name] for name in expected if name.startswith("model.")}
    )
    state: dict[int, dict[str, Tensor]] = {}
    for key in expected:
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = tensors[key]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    torch.set_rng_state(tensors["rng.cpu"])
    return facts


def _create_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give a new optimizer the state that a checkpoint fills: one step without gradient or learning rate."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def last_step(folder: Path, *, recorded: int, checkpoint_every: int) -> int:
    """The step that a run of `recorded` steps goes on after: its checkpoint's, or 0 if it ended before any."""
    path = folder / FILE
    if path.exists():
        return int(_read(path, with_tensors=False)[1]["step"])
    if recorded > checkpoint_every:
        raise UserError(
            f"there is no checkpoint {str(path)!r}, though the run has had {recorded} steps; was it removed?"
        )
    return 0


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file beside `path` and rename it over `path`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    try:
        save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, partial, metadata)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{str(path)!r} cannot be written: {error}") from error


def _read(path: Path, *, with_tensors: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
    except FileNotFoundError as error:
        raise UserError(f"there is no checkpoint {str(path)!r}; the run ended before its first one") from error
    except (SafetensorError, OSError) as error:
        raise UserError(f"the checkpoint {str(path)!r} cannot be read, it is damaged or incomplete: {error}") from error
    try:
        facts = json.loads(metadata["facts"])
        if metadata["format"] != _FORMAT or not isinstance(facts["step"], int):
            raise ValueError(f"format {metadata['format']!r}")
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(path)!r} is not a checkpoint of this program ({error!r})") from error
    return tensors, facts
