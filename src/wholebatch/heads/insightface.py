"""Centres and momentum from the files that insightface's PartialFC leaves, one for each of its ranks.

    rank_{r}_softmax_weight.pt, rank_{r}_softmax_weight_mom.pt     its first version: a tensor each
    softmax_fc_gpu_{r}.pt                                          its second: a state_dict with "weight"

Its rank r has the classes that a rank r of as many has here: the remainder goes to the first.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .._checks import check_instance, checked_path
from ..comm import handshake, select_communicator
from ..losses._door import told_to_all
from .partial_fc import PartialFC
from .rows import overlap

_WEIGHTS = (r"rank_(\d+)_softmax_weight\.pt", r"softmax_fc_gpu_(\d+)\.pt")
_MOMENTA = (r"rank_(\d+)_softmax_weight_mom\.pt",)


@told_to_all
def load_insightface(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Read centres, and with an optimizer their momentum, on any number of ranks, whatever theirs was. Collective.

    Args:
        folder: that holds all of its ranks' files.
        head: takes the centres.
        optimizer: a :class:`wholebatch.SparseSGD` of `head.weight`; takes the momentum, which the first version has.

    Raises:
        ValueError: on every rank, with head and optimizer as they were: files are missing, or are together of another
            number of classes or size of embeddings.
    """
    check_instance("head", head, PartialFC, "a wholebatch.PartialFC")
    comm, found = select_communicator(head.options.group), dict[str, list[Tensor]]()

    def state() -> dict[str, Any]:
        head.check_own()
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        found["weight"] = _shards(checked_path("folder", folder), _WEIGHTS, head)
        if optimizer is not None:
            found["momentum"] = _shards(checked_path("folder", folder), _MOMENTA, head)
        return {}

    handshake(comm, state, caller="load_insightface")
    with torch.no_grad():
        _copy(found["weight"], head.weight, head.own_classes.start)
        if optimizer is not None:
            momentum = optimizer.state[head.weight].setdefault("momentum_buffer", torch.zeros_like(head.weight))
            _copy(found["momentum"], momentum, head.own_classes.start)


def _shards(folder: Path, patterns: tuple[str, ...], head: PartialFC) -> list[Tensor]:
    """The ranks' tensors, in order; in the file until they are read."""
    for pattern in patterns:
        files = {int(at[1]): file for file in folder.glob("*.pt") if (at := re.fullmatch(pattern, file.name))}
        if not files:
            continue
        missing = set(range(max(files) + 1)) - files.keys()
        if missing:
            raise ValueError(f"{folder} has files of ranks {sorted(files)}, those of {sorted(missing)} are missing")
        shards = [_tensor(files[rank]) for rank in sorted(files)]
        rows, widths = sum(map(len, shards)), {shard.shape[1] for shard in shards}
        if head.sub_centres > 1 or head.bias is not None:
            raise ValueError("the files hold one centre for each class and no bias; the head has others")
        if rows != head.num_classes or widths != {head.embedding_size}:
            raise ValueError(
                f"the files in {folder} have {rows} classes of {sorted(widths)} numbers, the head has "
                f"{head.num_classes} of {head.embedding_size}"
            )
        return shards
    raise ValueError(f"{folder} holds no file whose name is {' or '.join(patterns)}")


def _tensor(file: Path) -> Tensor:
    loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    found = loaded.get("weight") if isinstance(loaded, dict) else loaded
    if not isinstance(found, Tensor) or found.dim() != 2:
        raise ValueError(f"{file} must hold a matrix of centres, or a state_dict with 'weight'")
    return found


def _copy(shards: list[Tensor], into: Tensor, first: int) -> None:
    """Rows [first, first + n) of all of them."""
    start = 0
    for shard in shards:
        shared = overlap(start, len(shard), first, len(into))
        if shared is not None:
            into[shared[1]] = shard[shared[0]].to(into)
        start += len(shard)
