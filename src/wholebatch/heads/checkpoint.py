"""Checkpoints of a sharded head that any number of ranks can load: rows are stored by class, not by rank.

Each rank writes the rows of its classes, and rank 0 an index of all; see `head_folder`. A rank that loads reads the
slices with rows of its classes, and selects these rows. The head is changed only after all ranks have read their rows.
No file is unpickled.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._base.checks import check_ids, check_instance, checked_path
from .._base.precision import accumulation_dtype
from .._base.settings import shown
from .._base.tensor_file import bytes_of, is_save_id, new_save_id
from ..comm import Communicator, select_communicator
from ..contract import bind_on_all_ranks
from .classes import NOT_HERE, check_parts, rows_within
from .head_folder import Index, check_is_new, read_index, read_rows, read_whole, write_index, write_rows
from .logits import OF_HEAD
from .optim import initial_state
from .partial_fc import PartialFC


@bind_on_all_ranks
def save_head(folder: Path | str, head: PartialFC, optimizer: Optimizer | None = None) -> str:
    """Write a head, and the optimizer's state of each class. Collective: 3 handshakes.

    Args:
        folder: a folder on storage that all ranks share, the same on all ranks; without another checkpoint.
        head: the local part of the head.
        optimizer: an optimizer of `head.parameters()`; its state of other parameters is not written.

    Returns:
        The id of this save, the same on all ranks and in all files of the folder. Save it with the backbone and pass it
        to :func:`load_head`, which then loads only the matching head.

    Raises:
        ValueError: on every rank: another rank's head, an unsupported optimizer, a folder that has a checkpoint or
            cannot be written.
    """
    comm = communicator_of(head)

    def state() -> dict[str, Any]:
        check_head(head)
        checked_path("folder", folder)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        if optimizer is not None and not _names_of(optimizer):
            raise ValueError(
                "optimizer must be a wholebatch.SparseSGD or SparseAdamW, which are PyTorch's on dense gradients, or "
                f"None; got {type(optimizer).__name__}. Use one of these, or save the optimizer yourself"
            )
        if optimizer is not None:
            _check_has(optimizer, head)
        check_is_new(Path(folder))
        return {**head.facts(), "folder": str(folder), "head": _facts(head, optimizer), "save": new_save_id()}

    def write_local() -> dict[str, Any]:
        rows = _rows_of(head, _states(optimizer, head))
        try:
            return write_rows(
                Path(folder), comm.rank, comm.size, save, head.local_classes.start, rows, _margin_buffers(head)
            )
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error}") from error

    def write_last() -> dict[str, Any]:
        try:
            if comm.rank == 0:
                write_index(Path(folder), save, everyone[0]["head"], written)
        except OSError as error:
            raise ValueError(f"{folder} cannot be written: {error}") from error
        return {}

    everyone = comm.handshake(state, caller="save_head", must_match=(*OF_HEAD, "folder", "head"))
    check_parts("save_head", everyone)
    save = str(everyone[0]["save"])
    written = comm.handshake(write_local, caller="save_head")
    comm.handshake(write_last, caller="save_head")
    return save


@bind_on_all_ranks
def load_head(
    folder: Path | str,
    head: PartialFC,
    optimizer: Optimizer | None = None,
    *,
    classes: Tensor | None = None,
    save_id: str | None = None,
) -> None:
    """Load a head that `save_head` has written, on any number of ranks. Collective: 2 handshakes.

    Args:
        folder: of the checkpoint.
        head: the head that gets the centers, and continues the samples.
        optimizer: the optimizer that gets the state; None: the state is not loaded. If it has other parameters as well,
            load its own state_dict first: that of any rank, of which the classes' part is replaced.
        classes: (C,) integers, the head's class for each of the checkpoint's C classes, the same on all ranks; -1
            leaves a class out. If several map to one class, for instance two that turned out to be the same, it gets
            the mean of their centers and of their optimizer state (not with sub-centers, which have no common order).
            A class to which none maps stays unchanged. So torch.arange(C) is for a head with new classes after the old
            ones. None: the classes are the same.
        save_id: the id that `save_head` returned; the folder of another save raises. None: any.

    Raises:
        ValueError: on every rank, with head and optimizer unchanged: there is no checkpoint of a head, one of its files
            is damaged or from another save, its number of classes or its embedding size differs, or it has no state of
            this kind of optimizer.
    """
    comm, loaded = communicator_of(head), dict[str, Any]()
    new_values: list[tuple[Tensor, Tensor]] = []  # tensors of the head and of the optimizer, with what they get

    def first() -> dict[str, Any]:
        check_head(head)
        checked_path("folder", folder)
        check_instance("optimizer", optimizer, (Optimizer, type(None)), "an optimizer of torch, or None")
        if save_id is not None and not is_save_id(save_id):
            raise ValueError(f"save_id must be an id that save_head has returned, or None; got {shown(save_id)}")
        loaded["index"] = index = read_index(Path(folder))
        if save_id not in (None, index.save):
            raise ValueError(f"{folder} belongs to another save: expected {save_id}, got {index.save}")
        _check(index.facts, head, optimizer, classes)
        checksum = None
        if classes is not None:
            checksum = f"of checksum {zlib.crc32(bytes_of(classes.detach().cpu().long().contiguous())):08x}"
        return {"classes": checksum, "save": index.save}

    def second() -> dict[str, Any]:
        index: Index = loaded["index"]
        new_classes = (
            torch.arange(index.facts["num_classes"], device="cpu") if classes is None else classes.cpu().long()
        )
        positions = rows_within(new_classes, head.local_classes)
        loaded["state"] = state = _state_with(optimizer, head, index.facts["optimizer"] or ())
        try:
            new_values.extend((x, _rows(index, name, x, positions)) for name, x in _rows_of(head, state).items())
            new_values.extend((x, read_whole(index, name, x)) for name, x in _margin_buffers(head).items())
        except OSError as error:
            raise ValueError(f"{folder} cannot be read, it is damaged or incomplete: {error}") from error
        return {}

    comm.handshake(first, caller="load_head", must_match=("classes", "save"))
    comm.handshake(second, caller="load_head")
    facts = loaded["index"].facts
    with torch.no_grad():
        if optimizer is not None:
            optimizer.state.update(loaded["state"])
        for x, value in new_values:
            x.copy_(value)
        head.step.fill_(facts["step"])
        head.seed.fill_(facts["seed"])


def communicator_of(head: PartialFC) -> Communicator:
    """Return the head's communicator; the default one if `head` is not a head, so that all ranks raise."""
    return select_communicator(head.options.group if isinstance(head, PartialFC) else None)


def check_head(head: object) -> None:
    """Raise ValueError unless this is a head with the local part of the classes."""
    if not isinstance(head, PartialFC):
        raise ValueError(f"head must be a wholebatch.PartialFC, got {type(head).__name__}")
    head.check_local()


def _facts(head: PartialFC, optimizer: Optimizer | None) -> dict[str, Any]:
    """Return the facts that the index of a checkpoint has about the head and its optimizer, if any."""
    known = None
    if optimizer is not None:
        known = sorted({name for state in _states(optimizer, head).values() for name in state})
    return {
        **head.size_facts(),
        "margin": sorted(_margin_buffers(head)),
        "step": int(head.step),
        "optimizer": known,
    }


def _check(facts: dict[str, Any], head: PartialFC, optimizer: Optimizer | None, classes: Tensor | None) -> None:
    if facts["embedding_size"] != head.embedding_size:
        raise ValueError(
            f"the checkpoint's embeddings have {facts['embedding_size']} numbers, the head's {head.embedding_size}; "
            f"create the head with embedding_size={facts['embedding_size']}"
        )
    for name, local, saved in (
        ("sub-centers of a class", head.sub_centers, facts["sub_centers"]),
        ("bias", head.bias is not None, facts["bias"]),
        ("buffers of the margin", sorted(_margin_buffers(head)), facts["margin"]),
    ):
        if local != saved:
            raise ValueError(f"{name}: the checkpoint has {saved}, the head {local}; create a head like the saved one")
    count = facts["num_classes"]
    if classes is None and count != head.num_classes:
        raise ValueError(
            f"the checkpoint has {count} classes, the head {head.num_classes}; pass the new class of each as classes=, "
            f"for instance torch.arange({count}) for a head with new classes at the end; -1 leaves a class out"
        )
    if classes is not None:
        check_ids("classes", classes, "the checkpoint's centers", count)
        low, high = int(classes.min()), int(classes.max())
        if not -1 <= low <= high < head.num_classes:
            raise ValueError(f"classes must lie in [0, {head.num_classes}), or be -1; got {low} to {high}")
        kept = classes[classes != NOT_HERE]
        if head.sub_centers > 1 and len(kept.unique()) < len(kept):
            raise ValueError(
                "classes must map no two classes to one for a head with sub-centers, because sub-centers have no "
                "common order; give each class its own"
            )
    if optimizer is not None:
        _check_optimizer(facts["optimizer"], head, optimizer)


def _check_optimizer(saved: list[str] | None, head: PartialFC, optimizer: Optimizer) -> None:
    names = _names_of(optimizer)
    if not names:
        raise ValueError(f"optimizer must be a SparseSGD or SparseAdamW, or None; got {type(optimizer).__name__}")
    _check_has(optimizer, head)
    if saved is None:
        raise ValueError("optimizer must be None: the checkpoint was saved without an optimizer")
    if saved and {*saved} != {*names}:
        raise ValueError(
            f"the checkpoint's optimizer has {saved} of each class, a {type(optimizer).__name__} has {sorted(names)}; "
            "pass one of the saved kind, or None"
        )


def _check_has(optimizer: Optimizer, head: PartialFC) -> None:
    has = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in head.named_parameters() if id(p) not in has]
    if missing:
        raise ValueError(f"optimizer must have head.parameters() among its parameters; it lacks {', '.join(missing)}")


def _names_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the names of an optimizer's state of each row; () for other optimizers."""
    names: tuple[str, ...] = getattr(optimizer, "row_state", ())
    return names


def _states(optimizer: Optimizer | None, head: PartialFC) -> dict[Tensor, dict[str, Tensor]]:
    """Return the optimizer's present state of the rows of each parameter: empty before its first step."""
    if optimizer is None:
        return {}
    states = {p: optimizer.state.get(p, {}) for p in head.parameters()}
    return {p: {name: state[name] for name in _names_of(optimizer) if name in state} for p, state in states.items()}


def _state_with(optimizer: Optimizer | None, head: PartialFC, names: Sequence[str]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the optimizer's state with these names; missing state is that of rows without a step.

    State with another number of rows is replaced, too: a state_dict of another rank has been loaded.
    """

    def get(p: Tensor, name: str, state: Mapping[str, Tensor]) -> Tensor:
        present = state.get(name)
        return initial_state(name, p) if present is None or present.shape[:1] != p.shape[:1] else present

    return {p: {name: get(p, name, state) for name in names} for p, state in _states(optimizer, head).items()}


def _margin_buffers(head: PartialFC) -> dict[str, Tensor]:
    """Return the margin's running statistics, the same on all ranks."""
    buffers = head.margin.named_buffers() if isinstance(head.margin, nn.Module) else ()
    return {f"margin/{name}": x for name, x in buffers}


def _rows_of(head: PartialFC, state: Mapping[Tensor, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors with a row for each local class: the head's, and those of an optimizer's state."""
    rows = {}
    for name, p in head.named_parameters():
        rows[name] = p.detach()
        rows |= {f"optimizer/{name}/{field}": x for field, x in state.get(p, {}).items()}
    return rows


def _rows(index: Index, name: str, present: Tensor, positions: Tensor) -> Tensor:
    """Return the present rows with row positions[i] replaced by the checkpoint's row i, or by the mean of several."""
    is_local = positions != NOT_HERE
    count = torch.bincount(positions[is_local], minlength=len(present))
    rows_out = present.detach().to("cpu", accumulation_dtype(present.dtype), copy=True)
    rows_out[count > 0] = 0
    for part, part_rows in read_rows(index, name, is_local, present):
        classes = slice(part.first, part.first + part.rows)
        to, rows = positions[classes][is_local[classes]], part_rows[is_local[classes]].to(rows_out.dtype)
        rows_out.index_add_(0, to, rows / count[to].view(-1, *[1] * (rows_out.dim() - 1)))
    return rows_out
