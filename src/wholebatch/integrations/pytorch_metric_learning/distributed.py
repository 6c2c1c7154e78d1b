"""Any of their losses and miners on the rows of all processes, in place of their wrappers of the same names."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import wholebatch as wb

from ...comm import Group
from .losses import BatchLoss
from .whole_batch import (
    MinedIndices,
    checked_indices,
    on_device,
    on_whole_batch,
    their_class,
    warn_of_local_labels,
)


class DistributedMinerWrapper(nn.Module):
    """pytorch-metric-learning's `DistributedMinerWrapper`: a miner on the rows of all processes.

    Rank 0 runs the miner, and all processes get its tuples. Pass them to a loss of this module.

    Args:
        miner: one of their tuple miners.
        efficient: accepted, and without effect.
        group: processes that share the batch. Default: all.

    Raises:
        TypeError: if `miner` is none of their miners.
        FrameworkError: if pytorch-metric-learning is missing or too old.
    """

    def __init__(self, miner: nn.Module, efficient: bool = False, *, group: Group = None) -> None:
        super().__init__()
        if not isinstance(miner, their_class("miners", "BaseMiner")):
            raise TypeError(f"miner must be a miner of pytorch-metric-learning, got {type(miner).__name__}")
        self.miner, self.efficient, self.group = miner, efficient, group

    @torch.no_grad()
    def forward(
        self, emb: Tensor, labels: Tensor, ref_emb: Tensor | None = None, ref_labels: Tensor | None = None
    ) -> MinedIndices:
        """Return the tuples of the whole batch.

        Args:
            emb: (b_r, d), this process's rows; b_r may differ between processes.
            labels: (b_r,) integers.
            ref_emb: (n_r, d), as in their miners, this process's.
            ref_labels: (n_r,), their labels.

        Raises:
            ValueError: on every process, if the miner raises.
        """
        comm = wb.comm.select_communicator(self.group)
        given = [emb, on_device(labels, emb), ref_emb, on_device(ref_labels, emb)]
        tensors = [None if x is None else comm.gather(x, check=True) for x in given]
        if given[3] is given[1]:
            tensors[3] = tensors[1]  # to their miners a row is then its reference
        mined: list[Tensor] = []

        def state() -> dict[str, Any]:
            if comm.rank == 0:
                mined.extend(x.long() for x in self.miner(*tensors))
            return {"lengths": [len(x) for x in mined]}

        lengths = comm.handshake(state, caller="DistributedMinerWrapper")[0]["lengths"]
        flat = torch.cat(mined) if mined else emb.new_empty(sum(lengths), dtype=torch.int64)
        return MinedIndices(comm.broadcast(flat, check=False).split(lengths))


class DistributedLossWrapper(nn.Module):
    """pytorch-metric-learning's `DistributedLossWrapper`: one of their losses, on the rows of all processes.

    L = loss(embeddings of all ranks, labels of all ranks, ...)

    All processes return this L. After the averaging of DDP every parameter has its gradient: the model's, and those
    of the loss itself (proxies, centers), which all processes hold in full.

    Args:
        loss: one of their losses, a CrossBatchMemory, a MultipleLosses, or a loss of this module, which is called as it
            is.
        efficient: accepted, and without effect: theirs changes the gradient.
        group: processes that share the batch. Default: all.

    Raises:
        TypeError: if `loss` is something else.
        FrameworkError: if pytorch-metric-learning is missing or too old.
    """

    def __init__(self, loss: nn.Module, efficient: bool = False, *, group: Group = None) -> None:
        super().__init__()
        if not isinstance(loss, BatchLoss):
            kinds = ("BaseMetricLossFunction", "CrossBatchMemory", "MultipleLosses")
            if not isinstance(loss, tuple(their_class("losses", name) for name in kinds)):
                name = type(loss).__name__
                hint = "leave the wrapper out" if "Wrapper" in name else "for another loss use wholebatch.WholeBatch"
                if name == "SelfSupervisedLoss":
                    hint = (
                        "use SelfSupervisedLoss of wholebatch.integrations.pytorch_metric_learning, which needs no "
                        "wrapper"
                    )
                raise TypeError(f"loss must be one of pytorch-metric-learning's losses, got {name}; {hint}")
        self.loss, self.efficient, self.group = loss, efficient, group
        self._called = False

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor | None = None,
        indices_tuple: tuple[Tensor, ...] | None = None,
        ref_emb: Tensor | None = None,
        ref_labels: Tensor | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            embeddings: (b_r, d), this process's rows; b_r may differ between processes and may be 0.
            labels: (b_r,), if the loss takes labels.
            indices_tuple: from :class:`DistributedMinerWrapper`.
            ref_emb: (n_r, d), as in their losses, this process's.
            ref_labels: (n_r,), their labels.
            enqueue_mask: (b_r,) booleans, for a CrossBatchMemory.

        Raises:
            ValueError: on every process, if the loss raises on any, or `indices_tuple` has positions of one process.
        """
        if isinstance(self.loss, BatchLoss):
            found: Tensor = self.loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)
            return found
        if not self._called:
            warn_of_local_labels(labels, self.group, "DistributedLossWrapper")
            self._called = True
        rows = {
            "embeddings": embeddings,
            "labels": on_device(labels, embeddings),
            "ref_emb": ref_emb,
            "ref_labels": on_device(ref_labels, embeddings),
            "enqueue_mask": on_device(enqueue_mask, embeddings),
        }
        indices = checked_indices(indices_tuple, self.group, "DistributedLossWrapper")
        return on_whole_batch(self.loss, self.group, rows, indices)


class SelfSupervisedLoss(nn.Module):
    """pytorch-metric-learning's `SelfSupervisedLoss`: a loss of two views of each example, on the whole batch.

    Their module numbers the examples of each process from 0, so that examples of two processes look like one class.
    Here all examples of the batch have numbers of their own.

    Args:
        loss: a loss of this module, or one of theirs that their SelfSupervisedLoss takes; also in a
            :class:`DistributedLossWrapper`, which is not needed.
        symmetric: whether rows of both views are anchors, each against the other rows of both; else rows of the first
            view are compared with those of the second.
        group: processes that share the batch; None: those of the loss.

    Raises:
        ValueError: for a group beside a loss of this module.
        Exception: their error for a loss that they do not support.
        FrameworkError: with one of their losses, or `symmetric=False`, if pytorch-metric-learning is missing or too
            old.
    """

    def __init__(self, loss: nn.Module, symmetric: bool = True, *, group: Group = None) -> None:
        super().__init__()
        if isinstance(loss, DistributedLossWrapper):
            group, loss = loss.group if group is None else group, loss.loss
        if isinstance(loss, BatchLoss):
            if group not in (None, loss.group):
                raise ValueError("group must be None with a loss of this module, which has a group; leave it out here")
            group = loss.group
        self.loss, self.symmetric, self.group = loss, symmetric, group
        if not isinstance(loss, BatchLoss):
            their_class("losses", "SelfSupervisedLoss")(loss, symmetric)  # checks the kind of loss

    def forward(self, embeddings: Tensor, ref_emb: Tensor) -> Tensor:
        """Return the loss of the whole batch.

        Args:
            embeddings: (b_r, d), this process's rows of the first view; b_r may differ between processes.
            ref_emb: (b_r, d), the second view; row i is another view of row i of `embeddings`.

        Raises:
            ValueError: on every process, for views with different numbers of rows.
        """
        comm = wb.comm.select_communicator(self.group)

        def state() -> dict[str, int]:
            if len(embeddings) != len(ref_emb):
                raise ValueError(
                    f"ref_emb must have a row for each of the {len(embeddings)} rows of embeddings, got {len(ref_emb)}"
                )
            return {"rows": len(embeddings)}

        counts = [of_rank["rows"] for of_rank in comm.handshake(state, caller="SelfSupervisedLoss")]
        if isinstance(self.loss, BatchLoss) and self.symmetric:
            first = sum(counts[: comm.rank])
            numbers = torch.arange(first, first + len(embeddings), device=embeddings.device).repeat(2)
            found: Tensor = self.loss.of_batch(torch.cat([embeddings, ref_emb]), numbers)
            return found
        loss = self.loss.theirs() if isinstance(self.loss, BatchLoss) else self.loss
        theirs = their_class("losses", "SelfSupervisedLoss")(loss, self.symmetric)
        return on_whole_batch(theirs, self.group, {"embeddings": embeddings, "ref_emb": ref_emb})
