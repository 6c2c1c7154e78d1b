"""One file per checkpoint: weights, optimiser and random state as safetensors, replaced in one step.

The new file is written beside the old one and renamed over it, so a run that is killed at any moment leaves a whole
checkpoint. Safetensors holds tensors and strings only: loading a file from elsewhere runs none of its content.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .errors import UserError

FILE = "checkpoint.safetensors"
_FORMAT = "wholebatch-train-1"


def save_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, step: int, seconds: float
) -> None:
    """Write folder/checkpoint.safetensors: the state after `step` steps and `seconds` of training."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in state.items()}
    tensors["rng.cpu"] = torch.get_rng_state()
    facts = {"step": step, "seconds": seconds, "torch": torch.__version__}
    save_tensors(folder / FILE, tensors, {"format": _FORMAT, "facts": json.dumps(facts)})


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put model, optimizer and random state where `save_checkpoint` found them; returns its facts."""
    tensors, facts = _read(folder / FILE, with_tensors=True)
    weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("optimizer."):
            _, index, name = key.split(".")
            state.setdefault(int(index), {})[name] = value
    try:
        model.load_state_dict(weights)
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        torch.set_rng_state(tensors["rng.cpu"])
    except (RuntimeError, KeyError, ValueError) as error:
        raise UserError(f"{folder / FILE} does not fit this configuration's model: {error}") from error
    return facts


def read_facts(folder: Path) -> dict[str, Any]:
    """{"step", "seconds", "torch"} of the checkpoint in `folder`."""
    return _read(folder / FILE, with_tensors=False)[1]


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file beside `path` and rename it over `path`."""
    from safetensors.torch import save_file

    partial = path.with_suffix(".partial")
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, partial, metadata)
    with partial.open("rb") as written:
        os.fsync(written.fileno())
    partial.replace(path)


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
    if metadata.get("format") != _FORMAT:
        raise UserError(f"{str(path)!r} is not a checkpoint of this program (format {metadata.get('format')!r})")
    return tensors, json.loads(metadata["facts"])
