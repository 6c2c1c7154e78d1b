"""Centres and momentum from the files that insightface's PartialFC leaves, one for each of its ranks.

    rank_{r}_softmax_weight.pt, rank_{r}_softmax_weight_mom.pt     its first version: a tensor each
    softmax_fc_gpu_{r}.pt                                          its second: a state_dict with "weight"
    checkpoint_gpu_{r}.pt                                          train_v2.py: that as "state_dict_softmax_fc", and
                                                                   the optimiser of backbone and classifier

Its rank r has the classes that a rank r of as many has here: the remainder goes to the first. The files are pickles, of
which nothing is executed: see `torch_file`.
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
from ..comm import handshake, select_communicator
from ..losses._door import told_to_all
from .described_pickle import StoredTensor
from .optim import SparseSGD
from .partial_fc import PartialFC
from .rows import overlap
from .torch_file import TorchFile

_RANK = r"(0|[1-9]\d{0,5})"


@told_to_all
def load_insightface(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Read centres, and with an optimizer their momentum, on any number of ranks, whatever theirs was. Collective.

    Nothing in the files is executed. The bytes of each tensor that is read are compared with their checksum.

    Args:
        folder: that holds all of its ranks' files.
        head: takes the centres.
        optimizer: a :class:`wholebatch.SparseSGD` of `head.weight`; takes the momentum, which the first version and
            train_v2.py with SGD have.

    Raises:
        ValueError: on every rank, with head and optimizer as they were: files are missing, damaged, of different steps,
            hold more than plain values and tensors, or are together of another number of classes or size of embeddings.
    """
    comm, found = select_communicator(head.options.group if isinstance(head, PartialFC) else None), dict[str, Tensor]()

    def state() -> dict[str, Any]:
        if not isinstance(head, PartialFC):
            raise ValueError(f"head must be a wholebatch.PartialFC, got {type(head).__name__}")
        head.check_own()
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        _check_optimizer(optimizer, head)
        checked_path("folder", folder)
        try:
            found["weight"] = _own_rows(Path(folder), "weight", head)
            if optimizer is not None:
                found["momentum"] = _own_rows(Path(folder), "momentum", head)
        except OSError as error:
            raise ValueError(f"{folder} cannot be read: {error}") from error
        return {}

    handshake(comm, state, caller="load_insightface")
    with torch.no_grad():
        head.weight.copy_(found["weight"])
        if optimizer is not None:
            momentum = optimizer.state[head.weight].setdefault("momentum_buffer", torch.zeros_like(head.weight))
            momentum.copy_(found["momentum"])


def _check_optimizer(optimizer: Optimizer | None, head: PartialFC) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, SparseSGD):
        raise ValueError(f"optimizer must be a wholebatch.SparseSGD, or None; got {type(optimizer).__name__}")
    if not any(p is head.weight for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer must have head.parameters() among its own; it lacks weight")


class _Kind(NamedTuple):
    """Files of one version: their names, where the tensor is in them, and what all of a checkpoint's have in common."""

    pattern: str
    take: Callable[[Any], Any]
    common: Callable[[Any], Any] = lambda content: None


def _weight_of(content: Any) -> Any:
    return content["state_dict_softmax_fc"]["weight"]


def _momentum_of(content: Any) -> Any:
    """That of the last parameter: the classifier's come after the backbone's."""
    optimizer = content["state_optimizer"]
    return optimizer["state"][optimizer["param_groups"][-1]["params"][-1]]["momentum_buffer"]


def _steps_of(content: Any) -> Any:
    steps = content["epoch"], content["global_step"]
    if not all(type(n) is int and 0 <= n < 2**63 for n in steps):
        raise TypeError("epoch and global_step must be numbers")
    return steps


_KINDS = {
    "weight": (
        _Kind(rf"rank_{_RANK}_softmax_weight\.pt", lambda content: content),
        _Kind(rf"softmax_fc_gpu_{_RANK}\.pt", lambda content: content["weight"]),
        _Kind(rf"checkpoint_gpu_{_RANK}\.pt", _weight_of, _steps_of),
    ),
    "momentum": (
        _Kind(rf"rank_{_RANK}_softmax_weight_mom\.pt", lambda content: content),
        _Kind(rf"checkpoint_gpu_{_RANK}\.pt", _momentum_of, _steps_of),
    ),
}


def _own_rows(folder: Path, what: str, head: PartialFC) -> Tensor:
    """The rows of this rank's classes."""
    if head.sub_centres > 1 or head.bias is not None:
        raise ValueError("the files hold one centre for each class and no bias; the head has others")
    kind, files = _files(folder, what)
    shards, common = [], dict[Path, Any]()
    for file in files:
        with TorchFile(file) as opened:
            _check_name(kind, file, opened.name)
            shards.append(_matrix(file, what, opened.content, kind.take))
            common[file] = _part(file, opened.content, kind.common, "epoch and global_step")
    first = common[files[0]]
    for file, steps in common.items():
        if steps != first:
            raise ValueError(f"{file} is of epoch and step {steps}, {files[0].name} of {first}: of different saves")
    rows, widths = sum(shard.shape[0] for shard in shards), {shard.shape[1] for shard in shards}
    if rows != head.num_classes or widths != {head.embedding_size}:
        raise ValueError(
            f"the files in {folder} have {rows} classes of {sorted(widths)} numbers, the head has "
            f"{head.num_classes} of {head.embedding_size}"
        )
    parts, start = [], 0
    for file, shard in zip(files, shards, strict=True):
        shared = overlap(start, shard.shape[0], head.own_classes.start, len(head.weight))
        if shared is not None:
            with TorchFile(file) as opened:
                parts.append(opened.rows(shard, shared[0]).to(head.weight.dtype))
        start += shard.shape[0]
    return torch.cat(parts)


def _files(folder: Path, what: str) -> tuple[_Kind, list[Path]]:
    """The ranks' files, in order."""
    for kind in _KINDS[what]:
        files = {int(at[1]): file for file in folder.glob("*.pt") if (at := re.fullmatch(kind.pattern, file.name))}
        if not files:
            continue
        missing = sorted(set(range(max(files) + 1)) - files.keys())
        if missing:
            raise ValueError(f"{folder} has files of ranks {sorted(files)}, those of {missing[:10]} are missing")
        return kind, [files[rank] for rank in sorted(files)]
    names = " or ".join(kind.pattern for kind in _KINDS[what]).replace(_RANK, "0").replace("\\", "")
    raise ValueError(f"{folder} holds no file whose name is {names}")


def _check_name(kind: _Kind, file: Path, saved_as: str) -> None:
    """The file is that of the rank that saved it, as far as the archive says it."""
    was = re.fullmatch(kind.pattern, f"{saved_as}.pt")
    now = re.fullmatch(kind.pattern, file.name)
    if was is not None and now is not None and was[1] != now[1]:
        raise ValueError(f"{file} was saved as {was[0]}: another rank's classes; give it its name again")


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
