"""Any of their losses, over the whole batch: CoSENT, AnglE, triplets of a batch, FLOPS of SPLADE, and others.

A loss with `compute_loss_from_embeddings(embeddings, labels)`, or a regularizer with `(embeddings)`, gets the rows of
all processes, labels included, by :class:`wholebatch.WholeBatch`. Each process computes all of it, which fits losses
with little work. For losses that are a mean over rows there is nothing to gain: averaging gradients makes them exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

import wholebatch as wb

from ...comm import Group
from .embedding import BatchLoss, Chunks


class WholeBatchLoss(BatchLoss):
    """A loss of sentence-transformers, of the embeddings and labels of all processes.

    Args:
        model: the model that the trainer trains.
        loss: one of their losses with `compute_loss_from_embeddings`, such as CoSENTLoss(model).
        mini_batch_size: rows that the model takes at once, with gradient caching; None: all.
        mini_batch_num_tokens: tokens that it takes at once, instead of rows.
        group: processes that share the batch. Default: all.
    """

    fewest_columns = 1  # their triplet losses compare the rows of one column by their labels

    def __init__(
        self,
        model: Any,  # their model
        loss: nn.Module,
        mini_batch_size: int | None = None,
        mini_batch_num_tokens: int | None = None,
        *,
        group: Group = None,
    ) -> None:
        super().__init__(model, group=group)
        if isinstance(loss, type):
            raise ValueError(
                f"loss must be an instance of a loss, got the class {loss.__name__}; pass {loss.__name__}(model)"
            )
        name = type(loss).__name__
        if isinstance(loss, BatchLoss):
            raise ValueError(
                f"loss must be one of sentence-transformers, got wholebatch's {name}; use it without this one"
            )
        if getattr(loss, "uses_gradient_cache", False):
            raise ValueError(
                f"loss must not cache gradients, got {name}; pass {name.removeprefix('Cached')}, and mini_batch_size= "
                "here"
            )
        if getattr(loss, "gather_across_devices", False):
            raise ValueError(
                f"loss must not gather, got {name} with gather_across_devices=True; leave it out, this module gathers"
            )
        if not hasattr(loss, "compute_loss_from_embeddings"):
            raise ValueError(
                f"loss must have compute_loss_from_embeddings(embeddings, labels), got {name}; it runs the model itself"
            )
        self.loss, self.group = loss, group
        if mini_batch_size is not None or mini_batch_num_tokens is not None:
            self.chunks = Chunks("their loss", model, mini_batch_size or 1, mini_batch_num_tokens)
        self.mini_batch_size, self.mini_batch_num_tokens = mini_batch_size, mini_batch_num_tokens

    def compute_loss_from_embeddings(
        self, embeddings: Sequence[Tensor] | Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """Return their loss of the embeddings and labels of all processes.

        Args:
            embeddings: (b, d) for each column, this process's; or one tensor, for losses that take one, as FlopsLoss.
            labels: (b, ...), this process's, or None.
        """
        theirs: Any = self.loss
        columns = [embeddings] if isinstance(embeddings, Tensor) else [*embeddings]

        def of_all(*rows: Tensor) -> Tensor:
            given = None if labels is None else rows[len(columns)].view(-1, *labels.shape[1:])
            if isinstance(embeddings, Tensor):
                found: Tensor = theirs.compute_loss_from_embeddings(rows[0], *([] if given is None else [given]))
            else:
                found = theirs.compute_loss_from_embeddings([*rows[: len(columns)]], given)
            return found

        beside = [] if labels is None else [labels.reshape(len(labels), -1)]
        return wb.WholeBatch(of_all, group=self.group)(*columns, *beside)

    compare = compute_loss_from_embeddings

    def get_config_dict(self) -> dict[str, Any]:  # values of any type
        """Return the arguments, for the model card."""
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return {"loss": type(self.loss).__name__, **sizes}
