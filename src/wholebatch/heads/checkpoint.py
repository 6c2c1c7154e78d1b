"""Checkpoints of a sharded head that any number of ranks can load: rows are kept by their class, not by their rank.

A folder of torch.distributed.checkpoint holds, of each tensor with a row for each class, slices of at most 65536 rows
under the name of their first class,

    weight/000000000000, weight/000000065536, ...;   optimizer/momentum_buffer/000000000000, ...

A rank that loads reads the slices that overlap with its classes, and takes its rows out of them.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ..comm import handshake, select_communicator
from ..comm.torch_distributed import TorchTransport
from .partial_fc import PartialFC
from .rows import overlap

_ROWS = 65536  # of a slice
_FACTS = "head"  # what the checkpoint is of


def save_head(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Write a head, and what its optimiser knows of each class. Collective.

    Args:
        folder: that all ranks see; it may not hold another checkpoint.
        head: the ranks' parts of it.
        optimizer: whose only parameter, or one of them, is `head.weight`; what it knows of others is not written.
    """
    if optimizer is not None and not _names_of(optimizer):
        raise ValueError(
            f"what a {type(optimizer).__name__} knows of each class is not known here: use wholebatch.SparseSGD or "
            "SparseAdamW, which are PyTorch's on dense gradients, or save the optimiser yourself"
        )
    tensors, of_classes = dict[str, Any](), _rows_of(head, optimizer)
    for name, x in of_classes.items():
        for start in range(0, len(x), _ROWS):
            tensors[f"{name}/{head.classes.start + start:012d}"] = x[start : start + _ROWS].detach()
    facts = {
        "num_classes": head.num_classes,
        "embedding_size": head.embedding_size,
        "step": int(head.step),
        "seed": int(head.seed),
        "optimizer": sorted(of_classes.keys() - {"weight"}),
    }
    comm = select_communicator(head.options.group)
    if comm.size > 1 and not isinstance(comm.transport, TorchTransport):
        raise ValueError(
            "checkpoints of several ranks are written by torch.distributed, and this head's group is another"
        )
    group = comm.transport.group if isinstance(comm.transport, TorchTransport) else None
    with _without_a_warning():
        save(
            {**tensors, _FACTS: json.dumps(facts)},
            checkpoint_id=Path(folder),
            process_group=group,
            no_dist=not isinstance(comm.transport, TorchTransport),
        )


def load_head(
    folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None, *, new_classes: bool = False
) -> None:
    """Read a head that `save_head` has written, on any number of ranks. Collective.

    Args:
        folder: of the checkpoint.
        head: takes its centres, and goes on with its samples.
        optimizer: takes its state; None: that is left alone.
        new_classes: whether the head may have more classes than the checkpoint: these, the last ones, stay as they are.

    Raises:
        ValueError: on every rank, with head and optimizer as they were: there is no checkpoint of a head, or it is of
            another number of classes or size of embeddings, or has no state of this kind of optimiser.
    """
    folder, found = Path(folder), dict[str, Any]()

    def state() -> dict[str, Any]:
        found["metadata"], found["facts"] = _read_facts(folder)
        _check(found["facts"], head, optimizer, new_classes=new_classes)
        return {}

    handshake(select_communicator(head.options.group), state, caller="load_head")
    facts = found["facts"]
    _fill(head, optimizer, facts["optimizer"])
    for name, x in _rows_of(head, optimizer).items():
        _read_rows(folder, found["metadata"], name, x, head.classes.start)
    with torch.no_grad():
        head.step.fill_(facts["step"])
        head.seed.fill_(facts["seed"])


def _read_facts(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there is in a checkpoint, and of which head."""
    try:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, RuntimeError) as error:
        raise ValueError(f"{folder} holds no checkpoint: {error}") from error
    if _FACTS not in metadata:
        raise ValueError(f"{folder} is a checkpoint, but none of a head that save_head has written")
    read = {_FACTS: ""}
    with _without_a_warning():
        load(read, checkpoint_id=folder, no_dist=True)
    return metadata, json.loads(read[_FACTS])


def _check(facts: dict[str, Any], head: PartialFC, optimizer: Optimizer | None, *, new_classes: bool) -> None:
    if facts["embedding_size"] != head.embedding_size:
        raise ValueError(
            f"the checkpoint's embeddings have {facts['embedding_size']} numbers, the head's {head.embedding_size}"
        )
    if facts["num_classes"] != head.num_classes and not (new_classes and facts["num_classes"] < head.num_classes):
        raise ValueError(
            f"the checkpoint has {facts['num_classes']} classes, the head {head.num_classes}; a head with more takes "
            "it with new_classes=True"
        )
    if optimizer is not None:
        if not _names_of(optimizer):
            raise ValueError(f"optimizer must be a SparseSGD or SparseAdamW, or None; got {type(optimizer).__name__}")
        if not any(p is head.weight for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer must have head.weight among its parameters")
        known = {f"optimizer/{name}" for name in _names_of(optimizer)}
        if known != set(facts["optimizer"]) and facts["optimizer"]:
            raise ValueError(
                f"the checkpoint's optimizer has {facts['optimizer']} of each class, a {type(optimizer).__name__} has "
                f"{sorted(known)}"
            )


def _names_of(optimizer: Optimizer) -> tuple[str, ...]:
    """What an optimiser may know of each row."""
    names: tuple[str, ...] = getattr(optimizer, "of_rows", ())
    return names


def _fill(head: PartialFC, optimizer: Optimizer | None, names: list[str]) -> None:
    """The optimiser's state, of which there is none before its first step."""
    if optimizer is None:
        return
    state = optimizer.state[head.weight]
    for name in _names_of(optimizer):
        if f"optimizer/{name}" in names:
            shape = head.weight.shape[:1] if name == "steps" else head.weight.shape
            dtype = torch.float32 if name == "steps" else head.weight.dtype
            state[name] = torch.zeros(shape, dtype=dtype, device=head.weight.device)
        else:
            state.pop(name, None)


def _rows_of(head: PartialFC, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Tensors with a row for each of this rank's classes."""
    found = {"weight": head.weight.detach()}
    if optimizer is not None:
        state = optimizer.state.get(head.weight, {})
        found |= {
            f"optimizer/{name}": x
            for name, x in state.items()
            if isinstance(x, Tensor) and x.dim() and len(x) == len(head.weight)
        }
    return found


def _read_rows(folder: Path, metadata: dict[str, Any], name: str, into: Tensor, first: int) -> None:
    """Rows [first, first + n) of a tensor, one slice at a time."""
    for key, start, size, dtype in _slices(metadata, name):
        shared = overlap(start, size[0], first, len(into))
        if shared is not None:
            wanted = {key: torch.empty(size, dtype=dtype)}
            with _without_a_warning():
                load(wanted, checkpoint_id=folder, no_dist=True)
            into[shared[1]] = wanted[key][shared[0]].to(into)


@contextmanager
def _without_a_warning() -> Iterator[None]:
    """Inside, nothing is said of a single process: each rank reads for itself, and that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _slices(metadata: dict[str, Any], name: str) -> Iterator[tuple[str, int, torch.Size, torch.dtype]]:
    for key, of in sorted(metadata.items()):
        stem, _, start = key.rpartition("/")
        if stem == name:
            yield key, int(start), of.size, of.properties.dtype
