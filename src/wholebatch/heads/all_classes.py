"""A head and its optimizer's state with all classes, as one process has them: for checkpoints that one rank writes.

Rank 0 gathers the rows of all classes on the CPU, some at a time. A rank that loads takes the rows of its classes from
such a state. So the state may be written and read by different numbers of ranks, and by a program without this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..comm import select_communicator
from ..partition import Partition
from .classes import check_enough_classes, check_parts
from .local_part import ROWS
from .logits import OF_HEAD
from .partial_fc import PartialFC

_NUMBERS = 2**24  # gathered from a rank at a time, which bounds the memory of rank 0's device

State = dict[str, Any]
Heads = Mapping[str, PartialFC]


def heads_of(module: nn.Module) -> dict[str, PartialFC]:
    """Return the heads in a module by their names; a head with several names occurs several times.

    >>> import torch, wholebatch as wb
    >>> list(heads_of(torch.nn.ModuleDict({"head": wb.PartialFC(2, 3)})))
    ['head']
    """
    return {name: x for name, x in module.named_modules(remove_duplicate=False) if isinstance(x, PartialFC)}


def names_in(module: nn.Module) -> list[str]:
    """Return the names, in a module, of all parameters and buffers of its heads, which an engine must leave alone."""
    heads = heads_of(module).values()
    ids = {id(x) for head in heads for x in (*head.parameters(), *head.buffers())}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return [name for name, x in named if id(x) in ids]


@torch.no_grad()
def keep_local_classes(head: PartialFC) -> None:
    """Keep only the local classes of a head that was created with all classes, before there were other ranks.

    Its parameters stay the same objects, so that an optimizer which has them keeps them. A head with the local classes
    is left as it is; one with another part of them is a ValueError.
    """
    comm = select_communicator(head.options.group)
    check_enough_classes(head.num_classes, comm.size)
    local = Partition.even(head.num_classes, comm.size).rows(comm.rank)
    if head.local_classes == local:
        return
    held = head.local_classes
    if held.stop - held.start != head.num_classes:
        raise ValueError(
            f"a head with classes {held.start} to {held.stop} of {head.num_classes} cannot become that of rank "
            f"{comm.rank} of {comm.size}: create it again, on each rank, and load a checkpoint"
        )
    for p in head.parameters():
        p.grad = None
        p.data = p.data[local].clone()
    head.local_classes = local
    head.first_class.fill_(local.start)


def whole_state_dict(state: State, heads: Heads) -> State:
    """Replace, on rank 0, each head's part in a module's state_dict by the rows of all classes; remove it on others.

    The state_dict is changed, and returned. Collective: 1 handshake for each head, and gathers.
    """
    for name, head in heads.items():
        prefix = f"{name}." if name else ""
        rows = {key: x for key in ROWS if (x := state.get(prefix + key)) is not None}
        for key, x in _gather(head, rows).items():
            state[prefix + key] = x
        if select_communicator(head.options.group).rank:
            for key in rows:
                del state[prefix + key]
            continue
        if prefix + "first_class" in state:
            state[prefix + "first_class"] = torch.tensor(0, device="cpu")
        metadata = getattr(state, "_metadata", {})
        if name in metadata and "classes" in metadata[name]:
            metadata[name]["classes"] = [0, head.num_classes, head.num_classes]
    return state


def whole_optimizer_state(state: State, optimizer: Optimizer, heads: Heads) -> State:
    """Return an optimizer's state_dict with the rows of all classes on rank 0, and without them on other ranks.

    It may have parameters of these heads. Collective: 1 handshake for each of these, and gathers. State that has no row
    for each class, such as factored second moments, is a ValueError on every rank.
    """
    states = dict(state["state"])
    for key, head, p in _of_heads(state, optimizer, heads):
        rows = {name: x for name, x in states[key].items() if isinstance(x, Tensor) and x.dim()}
        whole = _gather(head, rows, p, type(optimizer).__name__)
        states[key] = {**{name: x for name, x in states[key].items() if name not in rows}, **whole}
    return {**state, "state": states}


def local_optimizer_state(state: State, optimizer: Optimizer, heads: Heads) -> State:
    """Return an optimizer's state_dict of all classes, not of one rank's, with the rows of the local classes alone."""
    states = dict(state["state"])
    for key, head, _ in _of_heads(state, optimizer, heads):
        states[key] = {name: _local_rows(head, name, x) for name, x in states[key].items()}
    return {**state, "state": states}


def _of_heads(state: State, optimizer: Optimizer, heads: Heads) -> Iterator[tuple[Any, PartialFC, Tensor]]:
    """Yield the key of each parameter of a head that has state in an optimizer's state_dict, the head and it."""
    owner = {id(p): head for head in heads.values() for p in (head.weight, head.bias) if p is not None}
    keys = [key for group in state["param_groups"] for key in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for key, p in zip(keys, parameters, strict=False):
        if id(p) in owner and key in state["state"]:
            yield key, owner[id(p)], p


def _local_rows(head: PartialFC, name: str, x: Any) -> Any:
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if len(x) != head.num_classes:
        raise ValueError(
            f"the optimizer's {name} must have a row for each of {head.num_classes} classes, got {len(x)}: the "
            "checkpoint holds one rank's part. Save it with the state of all ranks"
        )
    return x[head.local_classes].clone()


@torch.no_grad()
def _gather(head: PartialFC, rows: Mapping[str, Tensor], p: Tensor | None = None, kind: str = "") -> dict[str, Tensor]:
    """Return these tensors with the rows of all classes, on the CPU of rank 0; nothing on other ranks."""
    comm = select_communicator(head.options.group)
    counts = Partition.even(head.num_classes, comm.size).counts

    def state() -> dict[str, Any]:
        for name, x in rows.items():
            if p is not None and x.shape not in (p.shape, p.shape[:1]):
                raise ValueError(
                    f"the state of an optimizer of a head must have a row for each class, got {name} of shape "
                    f"{tuple(x.shape)} of {kind}; use wholebatch.SparseSGD or SparseAdamW, or SGD, Adam or Adagrad of "
                    "torch"
                )
        return {**head.facts(), "tensors": [*rows]}

    by_rank = comm.handshake(state, caller="checkpoint of a head", must_match=(*OF_HEAD, "tensors"))
    check_parts("checkpoint of a head", by_rank)
    whole = {}
    for name, x in rows.items():
        x = x.to_dense() if x.is_sparse else x.detach()
        full = x.new_empty((head.num_classes if not comm.rank else 0, *x.shape[1:]), device="cpu")
        most = max(1, _NUMBERS // max(1, x[:1].numel()))
        for start in range(0, max(counts), most):
            sizes = [min(most, max(0, count - start)) for count in counts]
            part = comm.gather(x[start : start + most], counts=sizes, check=False).cpu()
            if not comm.rank:
                _place(full, part, counts, sizes, start)
        if not comm.rank:
            whole[name] = full
    return whole


def _place(full: Tensor, part: Tensor, counts: tuple[int, ...], sizes: list[int], start: int) -> None:
    """Write the rows of each rank from `start` on to the places of their classes."""
    first = 0
    for count, rows in zip(counts, part.split(sizes), strict=True):
        full[first + start : first + start + len(rows)] = rows
        first += count
