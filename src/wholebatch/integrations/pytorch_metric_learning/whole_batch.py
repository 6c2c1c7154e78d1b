"""Their classes, imported in the first call that needs them, on the rows of all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import wholebatch as wb

from ..._base.warnings import warn
from ...comm import Group
from .._framework import Framework

METRIC_LEARNING = Framework("pytorch_metric_learning", ("2.9.0",), "pip install 'pytorch-metric-learning>=2.9'")
_FEWEST = 4  # rows that make labels 0, 1, 2, ... suspicious


def their_class(module: str, name: str) -> Any:
    """Return `pytorch_metric_learning.<module>.<name>`, or raise FrameworkError if it is missing or too old."""
    return METRIC_LEARNING.find(f"pytorch_metric_learning.{module}", name)


def is_theirs(value: object, name: str) -> bool:
    """Return whether a value is an instance of exactly that class of theirs, without an import of it."""
    kind = type(value)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "pytorch_metric_learning"


class MinedIndices(tuple[Tensor, ...]):
    """Triplets (a, p, n) or pairs (a1, p, a2, n) of rows of the whole batch, rank 0's first; equal on all processes.

    A tuple of theirs has positions of rows of one process. Both have the same form, so this type tells them apart.
    """


def checked_indices(indices_tuple: tuple[Tensor, ...] | None, group: Group, caller: str) -> tuple[Tensor, ...] | None:
    """Return the indices, which are those of the whole batch.

    Raises:
        ValueError: on every process, for indices of one process's rows, or of another number on another process.
    """
    comm = wb.comm.select_communicator(group)

    def state() -> dict[str, list[int]]:
        if not isinstance(indices_tuple, MinedIndices):
            raise ValueError(
                "indices_tuple must come from DistributedMinerWrapper of "
                "wholebatch.integrations.pytorch_metric_learning on several processes, got a "
                f"{type(indices_tuple).__name__}; wrap the miner: alone it gives positions of one process"
            )
        return {"lengths of indices_tuple": [len(x) for x in indices_tuple]}

    if indices_tuple is not None and comm.size > 1:
        comm.handshake(state, caller=caller, must_match=("lengths of indices_tuple",))
    return indices_tuple


def on_whole_batch(
    loss: Callable[..., Any],  # their losses have no types
    group: Group,
    rows: Mapping[str, Tensor | None],
    indices_tuple: tuple[Tensor, ...] | None = None,
) -> Tensor:
    """Return a loss of theirs of the rows of all processes.

    Args:
        loss: called with these names, those without a value left out.
        group: processes that share the batch.
        rows: tensors with this process's rows, by name. If "ref_labels" is the object "labels", so it is for the loss.
        indices_tuple: of the whole batch.
    """
    given = {name: x for name, x in rows.items() if x is not None}
    shared = "labels" in given and given.get("ref_labels") is given["labels"]  # to them a row is then its reference
    if shared:
        del given["ref_labels"]
    options = {} if indices_tuple is None else {"indices_tuple": indices_tuple}

    def of_all(*full: Tensor) -> Tensor:
        named = dict(zip(given, full, strict=True))
        if shared:
            named["ref_labels"] = named["labels"]
        found: Tensor = loss(**named, **options)
        return found

    return wb.WholeBatch(of_all, group=group)(*given.values())


def on_device(labels: Tensor | None, embeddings: Tensor) -> Tensor | None:
    """Return labels on the device of the embeddings, as their losses take them from any device."""
    return labels.to(embeddings.device) if isinstance(labels, Tensor) else labels


def warn_of_local_labels(labels: Tensor | None, group: Group, caller: str) -> None:
    """Warn on a rank but the first if its labels are 0, 1, 2, ..., once or twice: equal labels on ranks are one class.

    Their SelfSupervisedLoss makes such labels on each process.
    """
    comm = wb.comm.select_communicator(group)
    if comm.rank == 0 or not isinstance(labels, Tensor) or labels.dim() != 1 or len(labels) < _FEWEST:
        return
    numbers = torch.arange(len(labels), device=labels.device)
    if any(torch.equal(labels, numbers % n) for n in (len(labels), len(labels) // 2)):
        warn(
            f"{caller}: the labels of rank {comm.rank} are 0, 1, 2, ..., as if each process counted its local rows; "
            "rows of equal labels are one class on all processes. For views without labels use SelfSupervisedLoss of "
            "wholebatch.integrations.pytorch_metric_learning, not pytorch-metric-learning's"
        )
