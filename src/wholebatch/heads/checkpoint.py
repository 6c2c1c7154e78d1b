"""Checkpoints of a sharded head that any number of ranks can load: rows are kept by their class, not by their rank.

A folder of torch.distributed.checkpoint holds, of each tensor with a row for each class, slices of at most 65536 rows
under the name of their first class,

    weight/000000000000, weight/000000065536, ...;   optimizer/weight/momentum_buffer/000000000000, ...

A rank that loads reads the slices with rows of its classes, and takes these out of them. Only when all ranks have read
theirs is anything changed.
"""

from __future__ import annotations

import json
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from .._checks import check_ids, check_instance, checked_path
from .._precision import accumulation_dtype
from ..comm import handshake, select_communicator
from ..comm.torch_distributed import TorchTransport
from ..losses._door import told_to_all
from .classes import NOT_HERE, rows_within
from .partial_fc import PartialFC

_ROWS = 65536  # of a slice
_FACTS = "head"  # what the checkpoint is of


@told_to_all
def save_head(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> None:
    """Write a head, and what its optimiser knows of each class. Collective.

    Args:
        folder: that all ranks see, the same on all; it may not hold another checkpoint.
        head: the ranks' parts of it.
        optimizer: with `head.parameters()` among its own; what it knows of others is not written.

    Raises:
        ValueError: on every rank: another rank's head, an optimiser whose state of each class is not known here, a
            folder that has a checkpoint or cannot be written.
    """
    check_instance("head", head, PartialFC, "a wholebatch.PartialFC")
    given, folder = folder, Path(folder) if isinstance(folder, str | Path) else Path()
    comm = select_communicator(head.options.group)

    def state() -> dict[str, Any]:
        checked_path("folder", given)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        head.check_own()
        if optimizer is not None and not _names_of(optimizer):
            raise ValueError(
                f"what a {type(optimizer).__name__} knows of each class is not known here: use wholebatch.SparseSGD or "
                "SparseAdamW, which are PyTorch's on dense gradients, or save the optimiser yourself"
            )
        if optimizer is not None:
            _check_has(optimizer, head)
        if comm.size > 1 and not isinstance(comm.transport, TorchTransport):
            raise ValueError(
                "checkpoints of several ranks are written by torch.distributed, and this head's group is another"
            )
        if (folder / ".metadata").exists():
            raise ValueError(f"{folder} has a checkpoint already")
        return {"folder": str(folder), "head": _facts(head, optimizer)}

    everyone = handshake(comm, state, caller="save_head", must_match=("folder", "head"))
    tensors = dict[str, Any]()
    for name, x in _rows_of(head, _known(optimizer, head)).items():
        for start in range(0, len(x), _ROWS):
            tensors[f"{name}/{head.own_classes.start + start:012d}"] = x[start : start + _ROWS]
    for name, x in _of_margin(head).items():
        tensors[f"margin/{name}"] = x
    transport = comm.transport
    try:
        with _without_a_warning():
            save(
                {**tensors, _FACTS: json.dumps(everyone[comm.rank]["head"])},
                checkpoint_id=folder,
                process_group=transport.group if isinstance(transport, TorchTransport) else None,
                no_dist=not isinstance(transport, TorchTransport),
            )
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ValueError(f"save_head: {folder} cannot be written: {_first_line(error)}") from error


@told_to_all
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
            their centres and of what the optimiser knows of them (not with sub-centres, which have no order that two
            classes share); one that none becomes stays as it is. So torch.arange(C) is for a head with new classes
            behind the old ones. None: the classes are the same.

    Raises:
        ValueError: on every rank, with head and optimizer as they were: there is no checkpoint of a head, or a damaged
            one, or it is of another number of classes or size of embeddings, or has no state of this kind of optimiser.
    """
    check_instance("head", head, PartialFC, "a wholebatch.PartialFC")
    given, folder = folder, Path(folder) if isinstance(folder, str | Path) else Path()
    comm, found = select_communicator(head.options.group), dict[str, Any]()

    def first() -> dict[str, Any]:
        checked_path("folder", given)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        head.check_own()
        found["metadata"], found["facts"] = _read_facts(folder)
        _check(found["facts"], head, optimizer, classes)
        return {
            "classes": None
            if classes is None
            else f"of checksum {zlib.crc32(classes.cpu().long().numpy().tobytes()):08x}"
        }

    def second() -> dict[str, Any]:
        count = found["facts"]["num_classes"]
        becomes = torch.arange(count) if classes is None else classes.cpu().long()
        at = rows_within(becomes, head.own_classes)
        found["state"] = _state_with(optimizer, head, found["facts"]["optimizer"] or ())
        found["into"] = _rows_of(head, found["state"])
        found["rows"] = {name: _rows(folder, found["metadata"], name, x, at) for name, x in found["into"].items()}
        found["margin"] = {
            name: _read(folder, f"margin/{name}", torch.empty_like(x, device="cpu"))
            for name, x in _of_margin(head).items()
        }
        return {}

    handshake(comm, first, caller="load_head", must_match=("classes",))
    handshake(comm, second, caller="load_head")
    facts = found["facts"]
    with torch.no_grad():
        if optimizer is not None:
            optimizer.state.update(found["state"])
        for name, x in found["into"].items():
            x.copy_(found["rows"][name])
        for name, x in _of_margin(head).items():
            x.copy_(found["margin"][name])
        head.step.fill_(facts["step"])
        head.seed.fill_(facts["seed"])


def _facts(head: PartialFC, optimizer: Optimizer | None) -> dict[str, Any]:
    """What a checkpoint is of; of the optimiser None where it is not part of it."""
    known = None
    if optimizer is not None:
        known = sorted({name for state in _known(optimizer, head).values() for name in state})
    return {
        "num_classes": head.num_classes,
        "embedding_size": head.embedding_size,
        "sub_centres": head.sub_centres,
        "bias": head.bias is not None,
        "margin": sorted(_of_margin(head)),
        "step": int(head.step),
        "seed": int(head.seed),
        "optimizer": known,
    }


def _read_facts(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What there is in a checkpoint, and of which head."""
    try:
        metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    except (OSError, RuntimeError, EOFError) as error:
        raise ValueError(f"{folder} holds no checkpoint: {_first_line(error)}") from error
    if _FACTS not in metadata:
        raise ValueError(f"{folder} is a checkpoint, but none of a head that save_head has written")
    return metadata, json.loads(_read(folder, _FACTS, ""))


def _read(folder: Path, key: str, like: Any) -> Any:
    """One of the things in a checkpoint."""
    read = {key: like}
    try:
        with _without_a_warning():
            load(read, checkpoint_id=folder, no_dist=True)
    except (CheckpointException, OSError, RuntimeError, EOFError) as error:
        raise ValueError(f"the checkpoint {folder} cannot be read, it is damaged: {_first_line(error)}") from error
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
            raise ValueError(
                f"{name}: the checkpoint has {one}, the head {own}; make a head like the one that was saved"
            )
    count = facts["num_classes"]
    if classes is None and count != head.num_classes:
        raise ValueError(
            f"the checkpoint has {count} classes, the head {head.num_classes}; which of these each of those is to be, "
            f"say with classes=: torch.arange({count}) if the head has new ones behind them, -1 for those that go"
        )
    if classes is not None:
        check_ids("classes", classes, "the checkpoint's centres", count)
        low, high = int(classes.min()), int(classes.max())
        if not -1 <= low <= high < head.num_classes:
            raise ValueError(f"classes must lie in [0, {head.num_classes}), or be -1; got {low} to {high}")
        kept = classes[classes != NOT_HERE]
        if head.sub_centres > 1 and len(kept.unique()) < len(kept):
            raise ValueError(
                "classes with several sub-centres cannot become one: the sub-centres of one are in no order that is "
                "another's"
            )
    if optimizer is not None:
        _check_optimizer(facts["optimizer"], head, optimizer)


def _check_optimizer(saved: list[str] | None, head: PartialFC, optimizer: Optimizer) -> None:
    names = _names_of(optimizer)
    if not names:
        raise ValueError(f"optimizer must be a SparseSGD or SparseAdamW, or None; got {type(optimizer).__name__}")
    _check_has(optimizer, head)
    if saved is None:
        raise ValueError("the checkpoint was saved without an optimizer; leave it out, and its state stays as it is")
    if saved and {*saved} != {*names}:
        raise ValueError(
            f"the checkpoint's optimizer has {saved} of each class, a {type(optimizer).__name__} has {sorted(names)}; "
            "pass one of the kind that was saved, or none"
        )


def _check_has(optimizer: Optimizer, head: PartialFC) -> None:
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in head.named_parameters() if id(p) not in has]
    if missing:
        raise ValueError(f"the optimizer must have head.parameters() among its own; it lacks {', '.join(missing)}")


def _names_of(optimizer: Optimizer) -> tuple[str, ...]:
    """What an optimiser may know of each row."""
    names: tuple[str, ...] = getattr(optimizer, "of_rows", ())
    return names


def _known(optimizer: Optimizer | None, head: PartialFC) -> dict[Tensor, dict[str, Tensor]]:
    """What it does know of the rows of each parameter: nothing before its first step."""
    if optimizer is None:
        return {}
    states = {p: optimizer.state.get(p, {}) for p in head.parameters()}
    return {p: {name: state[name] for name in _names_of(optimizer) if name in state} for p, state in states.items()}


def _state_with(optimizer: Optimizer | None, head: PartialFC, names: Sequence[str]) -> dict[Tensor, dict[str, Tensor]]:
    """What it knows by these names, and of what it does not yet know that of rows that have had no step."""
    known = _known(optimizer, head)
    return {p: {of: state[of] if of in state else _nothing(of, p) for of in names} for p, state in known.items()}


def _nothing(name: str, p: Tensor) -> Tensor:
    return p.new_zeros(p.shape[:1], dtype=torch.float32) if name == "steps" else torch.zeros_like(p).detach()


def _of_margin(head: PartialFC) -> dict[str, Tensor]:
    """What a margin learns from the batches, the same on all ranks."""
    return dict(head.margin.named_buffers()) if isinstance(head.margin, nn.Module) else {}


def _rows_of(head: PartialFC, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors with a row for each of this rank's classes: the head's own, and an optimiser's state of these."""
    found = {}
    for name, p in head.named_parameters():
        found[name] = p.detach()
        found |= {f"optimizer/{name}/{of}": x for of, x in state.get(p, {}).items()}
    return found


def _rows(folder: Path, metadata: dict[str, Any], name: str, present: Tensor, at: Tensor) -> Tensor:
    """The present rows, but row at[i] is the checkpoint's row i, of several the mean; NOT_HERE: it is nowhere."""
    count = torch.bincount(at[at != NOT_HERE], minlength=len(present))
    into = present.detach().to("cpu", accumulation_dtype(present.dtype), copy=True)
    into[count > 0] = 0
    for key, start, size, dtype in _slices(metadata, name):
        to = at[start : start + size[0]]
        here = to != NOT_HERE
        if here.any():
            rows = _read(folder, key, torch.empty(size, dtype=dtype))[here].to(into.dtype)
            into.index_add_(0, to[here], rows / count[to[here]].view(-1, *[1] * (into.dim() - 1)))
    return into


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


def _first_line(error: BaseException) -> str:
    """Enough of an error that may hold those of all ranks, with their tracebacks: of these the first."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
