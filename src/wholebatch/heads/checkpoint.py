"""Checkpoints of a sharded head that any number of ranks can load: rows are kept by their class, not by their rank.

A folder of torch.distributed.checkpoint holds, of each tensor with a row for each class, slices of at most 65536 rows
under the name of their first class,

    weight/000000000000, weight/000000065536, ...;   optimizer/weight/momentum_buffer/000000000000, ...

A rank that loads reads the slices with rows of its classes, and takes these out of them.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from .._checks import check_ids
from ..comm import handshake, select_communicator
from ..comm.torch_distributed import TorchTransport
from .classes import NOT_HERE, rows_within
from .partial_fc import PartialFC

_ROWS = 65536  # of a slice
_FACTS = "head"  # what the checkpoint is of


def save_head(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Write a head, and what its optimiser knows of each class. Collective.

    Args:
        folder: that all ranks see; it may not hold another checkpoint.
        head: the ranks' parts of it.
        optimizer: with `head.parameters()` among its own; what it knows of others is not written.
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
    for name, x in _of_margin(head).items():
        tensors[f"margin/{name}"] = x
    facts = {
        "num_classes": head.num_classes,
        "embedding_size": head.embedding_size,
        "sub_centres": head.sub_centres,
        "bias": head.bias is not None,
        "margin": sorted(_of_margin(head)),
        "step": int(head.step),
        "seed": int(head.seed),
        "optimizer": sorted({name.rpartition("/")[2] for name in of_classes if name.startswith("optimizer/")}),
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
    folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None, *, classes: Tensor | None = None
) -> None:
    """Read a head that `save_head` has written, on any number of ranks. Collective.

    Args:
        folder: of the checkpoint.
        head: takes its centres, and goes on with its samples.
        optimizer: takes its state; None: that is left alone.
        classes: (C,) integers, which of the head's classes each of the checkpoint's C is to be, the same on all ranks;
            -1: none, it is left out. A class that several become, as two that turned out to be one, gets the mean of
            their centres and of what the optimiser knows of them; one that none becomes stays as it is. So
            torch.arange(C) is for a head with new classes behind the old ones. None: the classes are the same.

    Raises:
        ValueError: on every rank, with head and optimizer as they were: there is no checkpoint of a head, or it is of
            another number of classes or size of embeddings, or has no state of this kind of optimiser.
    """
    folder, found = Path(folder), dict[str, Any]()

    def state() -> dict[str, Any]:
        found["metadata"], found["facts"] = _read_facts(folder)
        _check(found["facts"], head, optimizer, classes)
        return {"classes": None if classes is None else zlib.crc32(classes.cpu().numpy().tobytes())}

    handshake(select_communicator(head.options.group), state, caller="load_head", must_match=("classes",))
    facts = found["facts"]
    _fill(head, optimizer, facts["optimizer"])
    becomes = torch.arange(facts["num_classes"]) if classes is None else classes.cpu().long()
    for name, x in _rows_of(head, optimizer).items():
        _read_rows(folder, found["metadata"], name, x, rows_within(becomes, head.classes))
    with torch.no_grad():
        for name, x in _of_margin(head).items():
            x.copy_(_read(folder, f"margin/{name}", torch.empty_like(x, device="cpu")))
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
    return metadata, json.loads(_read(folder, _FACTS, ""))


def _read(folder: Path, key: str, like: Any) -> Any:
    """One of the things in a checkpoint."""
    read = {key: like}
    with _without_a_warning():
        load(read, checkpoint_id=folder, no_dist=True)
    return read[key]


def _check(facts: dict[str, Any], head: PartialFC, optimizer: Optimizer | None, classes: Tensor | None) -> None:
    if facts["embedding_size"] != head.embedding_size:
        raise ValueError(
            f"the checkpoint's embeddings have {facts['embedding_size']} numbers, the head's {head.embedding_size}"
        )
    for name, own, one in (
        ("sub-centres of a class", head.sub_centres, facts["sub_centres"]),
        ("bias", head.bias is not None, facts["bias"]),
        ("what the margin remembers", sorted(_of_margin(head)), facts["margin"]),
    ):
        if own != one:
            raise ValueError(f"{name}: the checkpoint has {one}, the head {own}")
    count = facts["num_classes"]
    if classes is None and count != head.num_classes:
        raise ValueError(
            f"the checkpoint has {count} classes, the head {head.num_classes}; which of these each of those is to be, "
            f"say with classes=: torch.arange({count}) if the head has new ones behind them"
        )
    if classes is not None:
        check_ids("classes", classes, "the checkpoint's centres", count)
        if count and not -1 <= int(classes.min()) <= int(classes.max()) < head.num_classes:
            raise ValueError(
                f"classes must lie in [0, {head.num_classes}), or be -1; got {int(classes.min())} to "
                f"{int(classes.max())}"
            )
    if optimizer is not None:
        if not _names_of(optimizer):
            raise ValueError(f"optimizer must be a SparseSGD or SparseAdamW, or None; got {type(optimizer).__name__}")
        has = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in head.named_parameters() if id(p) not in has]
        if missing:
            raise ValueError(f"the optimizer must have head.parameters() among its own; it lacks {', '.join(missing)}")
        known = {*_names_of(optimizer)}
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
    for p in head.parameters():
        state = optimizer.state[p]
        for name in _names_of(optimizer):
            if name in names:
                shape, dtype = (p.shape[:1], torch.float32) if name == "steps" else (p.shape, p.dtype)
                state[name] = torch.zeros(shape, dtype=dtype, device=p.device)
            else:
                state.pop(name, None)


def _of_margin(head: PartialFC) -> dict[str, Tensor]:
    """What a margin learns from the batches, the same on all ranks."""
    return dict(head.margin.named_buffers()) if isinstance(head.margin, nn.Module) else {}


def _rows_of(head: PartialFC, optimizer: Optimizer | None) -> dict[str, Tensor]:
    """Tensors with a row for each of this rank's classes."""
    found = {}
    for name, p in head.named_parameters():
        found[name] = p.detach()
        if optimizer is not None:
            known = optimizer.state.get(p, {})
            found |= {f"optimizer/{name}/{of}": known[of] for of in _names_of(optimizer) if of in known}
    return found


def _read_rows(folder: Path, metadata: dict[str, Any], name: str, into: Tensor, at: Tensor) -> None:
    """The tensor's row i to row at[i], or nowhere where that is NOT_HERE, one slice at a time; of several the mean."""
    count = torch.bincount(at[at != NOT_HERE], minlength=len(into))
    into[(count > 0).to(into.device)] = 0
    for key, start, size, dtype in _slices(metadata, name):
        to = at[start : start + size[0]]
        here = to != NOT_HERE
        if here.any():
            share = _read(folder, key, torch.empty(size, dtype=dtype))[here] / count[to[here]].view(
                -1, *[1] * (into.dim() - 1)
            )
            into.index_add_(0, to[here].to(into.device), share.to(into))


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
