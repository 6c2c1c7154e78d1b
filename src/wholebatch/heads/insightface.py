"""Load centers and momentum from the files that insightface's PartialFC writes, one for each of its ranks.

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import check_instance, checked_path
from ..comm import select_communicator
from ..contract import bind_on_all_ranks
from .described_pickle import StoredTensor
from .optim import SparseSGD
from .partial_fc import PartialFC
from .rows import overlap
from .torch_file import TorchFile

_RANK = r"(0|[1-9]\d{0,5})"


@bind_on_all_ranks
def load_insightface(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Load centers, and their momentum into an optimizer, on any number of ranks. Collective: 1 handshake.

    Nothing in the files is executed. The bytes of each tensor are compared with their checksum.

    Args:
        folder: the folder with the files of all of insightface's ranks.
        head: the head that gets the centers.
        optimizer: a :class:`wholebatch.SparseSGD` or torch.optim.SGD of `head.weight`, which gets the momentum. The
            files of the first version, and those of train_v2.py with SGD, contain it.

    Raises:
        ValueError: on every rank, with head and optimizer unchanged: files are missing, damaged, of different steps,
            hold more than plain values and tensors, or have another number of classes or embedding size.
    """
    comm, found = select_communicator(head.options.group if isinstance(head, PartialFC) else None), dict[str, Tensor]()

    def state() -> dict[str, Any]:
        if not isinstance(head, PartialFC):
            raise ValueError(f"head must be a wholebatch.PartialFC, got {type(head).__name__}")
        head.check_local()
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        if head.sub_centers > 1 or head.bias is not None:
            raise ValueError(
                "head must have sub_centers=1 and bias=False, as the files do; got "
                f"sub_centers={head.sub_centers} and bias={head.bias is not None}"
            )
        _check_optimizer(optimizer, head)
        checked_path("folder", folder)
        try:
            weight, momentum = _version_in(Path(folder))
            found["weight"] = _local_rows(Path(folder), "weight", weight, head)
            if optimizer is not None and momentum is None:
                raise ValueError(f"files like {_name_of(weight)} hold no momentum; leave the optimizer out")
            if optimizer is not None and momentum is not None:
                found["momentum"] = _local_rows(Path(folder), "momentum", momentum, head)
        except OSError as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        return {}

    comm.handshake(state, caller="load_insightface")
    with torch.no_grad():
        head.weight.copy_(found["weight"])
        if optimizer is not None:
            momentum = optimizer.state[head.weight].setdefault("momentum_buffer", torch.zeros_like(head.weight))
            momentum.copy_(found["momentum"])


def _check_optimizer(optimizer: Optimizer | None, head: PartialFC) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, SparseSGD | torch.optim.SGD):
        raise ValueError(
            f"optimizer must be a wholebatch.SparseSGD, a torch.optim.SGD, or None; got {type(optimizer).__name__}"
        )
    if not any(p is head.weight for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("optimizer must have head.parameters() among its parameters; it lacks weight")


class _Files(NamedTuple):
    """The files of one tensor: the pattern of their names, a function that takes it, and one for the common content."""

    pattern: str
    take: Callable[[Any], Any]
    common: Callable[[Any], Any] = lambda content: None


def _weight_of(content: Any) -> Any:
    return content["state_dict_softmax_fc"]["weight"]


def _momentum_of(content: Any) -> Any:
    """Return the momentum of the last parameter: those of the classifier come after those of the backbone."""
    optimizer = content["state_optimizer"]
    last = optimizer["param_groups"][-1]["params"][-1]
    if type(last) is not int:
        raise TypeError("parameters must have numbers")
    return optimizer["state"][last]["momentum_buffer"]


def _steps_of(content: Any) -> Any:
    steps = content["epoch"], content["global_step"]
    if not all(type(n) is int and 0 <= n < 2**63 for n in steps):
        raise TypeError("epoch and global_step must be numbers")
    return steps


# For each version the files of the weight, and those of the momentum, if any.
_VERSIONS = (
    (
        _Files(rf"rank_{_RANK}_softmax_weight\.pt", lambda content: content),
        _Files(rf"rank_{_RANK}_softmax_weight_mom\.pt", lambda content: content),
    ),
    (_Files(rf"softmax_fc_gpu_{_RANK}\.pt", lambda content: content["weight"]), None),
    (
        _Files(rf"checkpoint_gpu_{_RANK}\.pt", _weight_of, _steps_of),
        _Files(rf"checkpoint_gpu_{_RANK}\.pt", _momentum_of, _steps_of),
    ),
)


def _version_in(folder: Path) -> tuple[_Files, _Files | None]:
    """Return the files of the first version that has one in the folder."""
    for weight, momentum in _VERSIONS:
        if _by_rank(folder, weight):
            return weight, momentum
    names = " or ".join(_name_of(weight) for weight, _ in _VERSIONS)
    raise ValueError(f"{folder} holds no file whose name is {names}")


def _by_rank(folder: Path, files: _Files) -> dict[int, Path]:
    return {int(at[1]): file for file in folder.glob("*.pt") if (at := re.fullmatch(files.pattern, file.name))}


def _name_of(files: _Files) -> str:
    return files.pattern.replace(_RANK, "0").replace("\\", "")


def _local_rows(folder: Path, what: str, files: _Files, head: PartialFC) -> Tensor:
    """Return the rows of the local classes."""
    found = _by_rank(folder, files)
    missing = sorted(set(range(max(found, default=0) + 1)) - found.keys())
    if missing:
        raise ValueError(
            f"{folder} has files like {_name_of(files)} of ranks {sorted(found)}, those of {missing[:10]} are missing"
        )
    shards, common = dict[Path, StoredTensor](), dict[Path, Any]()
    for _, file in sorted(found.items()):
        with TorchFile(file) as opened:
            _check_name(files, file, opened.name)
            shards[file] = _matrix(file, what, opened.content, files.take)
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


def _check_name(files: _Files, file: Path, saved_as: str) -> None:
    """Raise ValueError if the archive says that another rank saved the file."""
    was = re.fullmatch(files.pattern, f"{saved_as}.pt")
    now = re.fullmatch(files.pattern, file.name)
    if was is not None and now is not None and was[1] != now[1]:
        raise ValueError(f"{file} was saved as {was[0]}: another rank's classes; restore that name")


def _part(file: Path, content: Any, take: Callable[[Any], Any], what: str) -> Any:
    try:
        return take(content)
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{file} must hold {what} where insightface writes it; it is missing there") from error


def _matrix(file: Path, what: str, content: Any, take: Callable[[Any], Any]) -> StoredTensor:
    found = _part(file, content, take, f"the classifier's {what}")
    if not isinstance(found, StoredTensor) or len(found.shape) != 2 or not found.storage.dtype.is_floating_point:
        raise ValueError(f"{file} must hold a matrix of floating-point numbers for the classifier's {what}")
    return found
