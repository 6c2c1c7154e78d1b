"""Load centers and the optimizer's state from the files that insightface's PartialFC writes, one for each of its ranks.

    rank_{r}_softmax_weight.pt, rank_{r}_softmax_weight_mom.pt     its first version: a tensor each
    softmax_fc_gpu_{r}.pt                                          its second version: a state_dict with "weight"
    checkpoint_gpu_{r}.pt                                          train_v2.py: such a state_dict under the name
                                                                   "state_dict_softmax_fc", and the optimizer of
                                                                   backbone and classifier

insightface distributes classes as `PartialFC` does: evenly, with the remainder on the first ranks. The files are
pickles, and nothing in them is executed: see `torch_file`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._base.checks import check_instance, checked_path
from ..contract import bind_on_all_ranks
from .checkpoint import check_head, communicator_of
from .described_pickle import StoredTensor
from .optim import SparseAdamW, SparseSGD
from .partial_fc import PartialFC
from .rows import overlap
from .torch_file import TorchFile

_RANK = r"(0|[1-9]\d{0,5})"


@bind_on_all_ranks
def load_insightface(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Load centers, and their state in an optimizer, on any number of ranks. Collective: 1 handshake.

    Nothing in the files is executed. The bytes of each tensor are compared with their checksum.

    Args:
        folder: the folder with the files of all of insightface's ranks.
        head: the head that gets the centers.
        optimizer: an optimizer of `head.weight`. A :class:`wholebatch.SparseSGD` or torch.optim.SGD gets the momentum,
            which the files of the first version contain, and those of train_v2.py with SGD. A
            :class:`wholebatch.SparseAdamW` or torch.optim.AdamW gets the averages and the number of steps, which those
            of train_v2.py with AdamW contain.

    Raises:
        ValueError: on every rank, with head and optimizer unchanged: files are missing, damaged, of different steps,
            hold more than plain values and tensors, are of another optimizer, or have another number of classes or
            embedding size.
    """
    comm, parts = communicator_of(head), dict[str, Tensor]()
    steps: list[float] = []

    def state() -> dict[str, Any]:
        check_head(head)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        if head.sub_centers > 1 or head.bias is not None:
            raise ValueError(
                "head must have sub_centers=1 and bias=False, as the files do; got "
                f"sub_centers={head.sub_centers} and bias={head.bias is not None}"
            )
        kind = None if optimizer is None else _kind_of(optimizer, head)
        checked_path("folder", folder)
        try:
            weight, states = _version_in(Path(folder))
            parts["weight"] = _local_rows(Path(folder), "weight", weight, head)
            if kind is not None and kind.names[0] not in states:
                raise ValueError(f"files like {_name_of(weight)} hold no {kind.content}; leave the optimizer out")
            if kind is not None:
                for name in kind.names:
                    parts[name] = _local_rows(Path(folder), f"{name} of {kind.name}", states[name], head)
                if kind.counts:
                    steps.append(_steps_in(Path(folder), states["step"]))
        except OSError as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        return {}

    comm.handshake(state, caller="load_insightface")
    with torch.no_grad():
        head.weight.copy_(parts.pop("weight"))
        if optimizer is not None:
            for name, rows in parts.items():  # state that is there may be that of another rank, with other rows
                optimizer.state[head.weight][name] = rows.to(head.weight.device)
            if steps:
                _set_steps(optimizer, head.weight, steps[0])


class _Kind(NamedTuple):
    """A kind of optimizer, by the state that it has of the centers."""

    name: str
    content: str  # its state of the centers, in words
    names: tuple[str, ...]  # its matrices like that of the centers
    counts: bool = False  # whether it counts its steps


def _kind_of(optimizer: Optimizer, head: PartialFC) -> _Kind:
    """Return the kind of an optimizer of the head; raise ValueError for others."""
    adam = isinstance(optimizer, SparseAdamW | torch.optim.AdamW)
    if not adam and not isinstance(optimizer, SparseSGD | torch.optim.SGD):
        raise ValueError(
            "optimizer must be a wholebatch.SparseSGD or SparseAdamW, a torch.optim.SGD or AdamW, or None; got "
            f"{type(optimizer).__name__}"
        )
    groups = [group for group in optimizer.param_groups if any(p is head.weight for p in group["params"])]
    if not groups:
        raise ValueError("optimizer must have head.parameters() among its parameters; it lacks weight")
    if not adam:
        return _Kind("SGD", "momentum", ("momentum_buffer",))
    largest = ("max_exp_avg_sq",) if groups[0].get("amsgrad") else ()
    return _Kind("AdamW", "averages", ("exp_avg", "exp_avg_sq", *largest), counts=True)


def _set_steps(optimizer: Optimizer, weight: Tensor, steps: float) -> None:
    """Set the number of steps of AdamW: one for each row in SparseAdamW, and one in torch's."""
    if isinstance(optimizer, SparseAdamW):
        optimizer.state[weight]["steps"] = torch.full_like(weight[:, 0], steps, dtype=torch.float32)
        return
    (group,) = (group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
    device = weight.device if group["capturable"] or group["fused"] else "cpu"
    optimizer.state[weight]["step"] = torch.tensor(steps, dtype=torch.float32, device=device)


class _Files(NamedTuple):
    """The files of one tensor: the pattern of their names, a function that takes it, and one for the common content."""

    pattern: str
    take: Callable[[Any], Any]
    common: Callable[[Any], Any] = lambda content: None


def _weight_of(content: Any) -> Any:
    return content["state_dict_softmax_fc"]["weight"]


def _state_of(name: str) -> Callable[[Any], Any]:
    """Return a function that takes the last parameter's state: those of the classifier come after the backbone's."""

    def take(content: Any) -> Any:
        optimizer = content["state_optimizer"]
        last = optimizer["param_groups"][-1]["params"][-1]
        if type(last) is not int:
            raise TypeError("parameters must have numbers")
        return optimizer["state"][last][name]

    return take


def _steps_of(content: Any) -> Any:
    steps = content["epoch"], content["global_step"]
    if not all(type(n) is int and 0 <= n < 2**63 for n in steps):
        raise TypeError("epoch and global_step must be numbers")
    return steps


_OF_TRAIN_V2 = rf"checkpoint_gpu_{_RANK}\.pt"

# For each version the files of the weight, and those of the optimizer's state by its name.
_VERSIONS: tuple[tuple[_Files, Mapping[str, _Files]], ...] = (
    (
        _Files(rf"rank_{_RANK}_softmax_weight\.pt", lambda content: content),
        {"momentum_buffer": _Files(rf"rank_{_RANK}_softmax_weight_mom\.pt", lambda content: content)},
    ),
    (_Files(rf"softmax_fc_gpu_{_RANK}\.pt", lambda content: content["weight"]), {}),
    (
        _Files(_OF_TRAIN_V2, _weight_of, _steps_of),
        {
            name: _Files(_OF_TRAIN_V2, _state_of(name), _steps_of)
            for name in ("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
        },
    ),
)


def _version_in(folder: Path) -> tuple[_Files, Mapping[str, _Files]]:
    """Return the files of the first version that has one in the folder."""
    for weight, states in _VERSIONS:
        if _files_by_rank(folder, weight):
            return weight, states
    names = " or ".join(_name_of(weight) for weight, _ in _VERSIONS)
    raise ValueError(f"{folder} holds no file whose name is {names}")


def _files_by_rank(folder: Path, files: _Files) -> dict[int, Path]:
    return {int(m[1]): file for file in folder.glob("*.pt") if (m := re.fullmatch(files.pattern, file.name))}


def _name_of(files: _Files) -> str:
    return files.pattern.replace(_RANK, "0").replace("\\", "")


def _local_rows(folder: Path, name: str, files: _Files, head: PartialFC) -> Tensor:
    """Return the rows of the local classes."""
    by_rank = _files_by_rank(folder, files)
    missing = sorted(set(range(max(by_rank, default=0) + 1)) - by_rank.keys())
    if missing:
        raise ValueError(
            f"{folder} has files like {_name_of(files)} of ranks {sorted(by_rank)}, those of {missing[:10]} are missing"
        )
    shards, common = dict[Path, StoredTensor](), dict[Path, Any]()
    for _, file in sorted(by_rank.items()):
        with TorchFile(file) as opened:
            _check_name(files, file, opened.name)
            shards[file] = _matrix(file, name, opened.content, files.take)
            common[file] = _part(file, opened.content, files.common, "epoch and global_step")
    (first, first_steps), *others = common.items()
    for file, steps in others:
        if steps != first_steps:
            raise ValueError(f"{file} is of epoch and step {steps}, {first.name} of {first_steps}: of different saves")
    rows, widths = sum(shard.shape[0] for shard in shards.values()), {shard.shape[1] for shard in shards.values()}
    if rows != head.num_classes or widths != {head.embedding_size}:
        raise ValueError(
            f"the files in {folder} have {rows} classes of {sorted(widths)} numbers, the head has "
            f"{head.num_classes} of {head.embedding_size}"
        )
    parts, start = [], 0
    for file, shard in shards.items():
        shared = overlap(start, shard.shape[0], head.local_classes.start, len(head.weight))
        if shared is not None:
            with TorchFile(file) as opened:
                parts.append(opened.rows(shard, shared[0]).to(head.weight.dtype))
        start += shard.shape[0]
    return torch.cat(parts)


def _steps_in(folder: Path, files: _Files) -> float:
    """Return the number of the optimizer's steps, which is the same in all files."""
    by_file = dict[Path, float]()
    for _, file in sorted(_files_by_rank(folder, files).items()):
        with TorchFile(file) as opened:
            content = _part(file, opened.content, files.take, "the number of AdamW's steps")
            if isinstance(content, StoredTensor) and content.shape in ((), (1,)):
                content = opened.rows(replace(content, shape=(1, 1), stride=(1, 1)), slice(0, 1)).item()
        if type(content) not in (int, float) or not 0 <= content < 2**24:
            shown = reprlib.repr(content)  # cut short at each level: a tuple of 2^60 parts may take few bytes in a file
            raise ValueError(f"{file} must hold the number of the optimizer's steps, got {shown}")
        by_file[file] = float(content)
    (first, steps), *others = by_file.items()
    for file, other in others:
        if other != steps:
            raise ValueError(f"{file} is of step {other:.0f} of the optimizer, {first.name} of {steps:.0f}")
    return steps


def _check_name(files: _Files, file: Path, saved_as: str) -> None:
    """Raise ValueError if the archive says that another rank saved the file."""
    was = re.fullmatch(files.pattern, f"{saved_as}.pt")
    now = re.fullmatch(files.pattern, file.name)
    if was is not None and now is not None and was[1] != now[1]:
        raise ValueError(f"{file} was saved as {was[0]}: another rank's classes; restore that name")


def _part(file: Path, content: Any, take: Callable[[Any], Any], name: str) -> Any:
    try:
        return take(content)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file} must hold {name} where insightface writes it; it is missing there") from error


def _matrix(file: Path, name: str, content: Any, take: Callable[[Any], Any]) -> StoredTensor:
    matrix = _part(file, content, take, f"the classifier's {name}")
    if not isinstance(matrix, StoredTensor) or len(matrix.shape) != 2 or not matrix.storage.dtype.is_floating_point:
        raise ValueError(f"{file} must hold a matrix of floating-point numbers for the classifier's {name}")
    return matrix
