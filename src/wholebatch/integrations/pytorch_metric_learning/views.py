"""Two views of each example instead of labels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import wholebatch as wb

from ...comm import Group
from .distributed import DistributedLossWrapper
from .losses import BatchLoss
from .theirs import their_class
from .whole_batch import on_whole_batch


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
