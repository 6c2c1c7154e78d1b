"""Losses of other losses: one of these for several embedding sizes, and any of theirs over the whole batch.

Their MatryoshkaLoss takes these losses as well, and calls them once for each size. This one computes the sizes of
InfoNCE of pairs in one sweep, by :func:`wholebatch.functional.matryoshka_loss`, and takes a trained scale with cached
losses.

A loss of theirs with `compute_loss_from_embeddings(embeddings, labels)` (CoSENT, AnglE, triplets of a batch), or a
regularizer with `(embeddings)` (FLOPS of SPLADE), gets the rows of all processes, labels included, by
:class:`wholebatch.WholeBatch`. Each process computes all of it, which fits losses with little work. For losses that are
a mean over rows there is nothing to gain: averaging gradients makes them exact.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import normalize

import wholebatch as wb

from .._options import AdaptedLoss
from .checkpoints import keep_parameters
from .embedding import BatchLoss, Described, Features, chunk_size_of, columns_of
from .ranking import MultipleNegativesRankingLoss


class MatryoshkaLoss(Described, AdaptedLoss, options=()):
    """Their `MatryoshkaLoss`, of a loss of this module.

    Args:
        loss: a loss of this module, cached or not.
        matryoshka_dims: sizes of the parts, each once, at most the size of the embeddings.
        matryoshka_weights: one for each size, >= 0; default 1.
        n_dims_per_step: number of sizes that a step draws, or -1 for all. All processes draw the same ones.
    """

    model: Any  # their model
    loss: nn.Module
    matryoshka_dims: Sequence[int]
    matryoshka_weights: Sequence[float] | Sequence[int] | None = None
    n_dims_per_step: int = -1

    def prepare(self) -> None:
        loss, dims, drawn = self.loss, [*self.matryoshka_dims], self.n_dims_per_step
        if not isinstance(loss, BatchLoss):
            raise ValueError(
                "loss must be one of wholebatch.integrations.sentence_transformers, got "
                f"{type(loss).__module__}.{type(loss).__name__}; for it use MatryoshkaLoss of sentence_transformers"
            )
        weights = [1.0] * len(dims) if self.matryoshka_weights is None else [float(x) for x in self.matryoshka_weights]
        if not dims or len(set(dims)) < len(dims) or any(dim < 1 for dim in dims):
            raise ValueError(f"matryoshka_dims must be positive, and each of them once, got {dims}")
        if len(weights) != len(dims) or min(weights) < 0:
            raise ValueError(
                f"matryoshka_weights must be {len(dims)} numbers, one for each of matryoshka_dims, none negative, got "
                f"{weights}"
            )
        largest = self.model.get_embedding_dimension()
        if largest is not None and max(dims) > largest:
            raise ValueError(f"matryoshka_dims must not exceed the model's embedding size {largest}, got {dims}")
        if drawn < -1 or drawn == 0:
            raise ValueError(f"n_dims_per_step must be -1 for all sizes, or at least 1, got {drawn}")
        self.parts = sorted(zip(dims, weights, strict=True))
        self.matryoshka_dims, self.matryoshka_weights = zip(*reversed(self.parts), strict=True)
        self._calls = 0

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the weighted sum of the losses of all sizes, the same on all processes."""
        loss: Any = self.loss
        columns = columns_of(sentence_features)
        beside = loss.beside(columns, labels)
        embeddings, parts = loss.embed(columns), self._draw_sizes()
        if isinstance(loss, MultipleNegativesRankingLoss) and len(embeddings) == 2 and loss.symmetric is not None:
            return wb.functional.matryoshka_loss(
                *embeddings,
                logit_scale=loss.scale_value(),
                dims=[dim for dim, _ in parts],
                dim_weights=[weight for _, weight in parts],
                symmetric=loss.symmetric,
                **loss.options_of_call,
            )
        losses = [
            weight * loss.compare([normalize(x[..., :dim], dim=-1) for x in embeddings], beside)
            for dim, weight in parts
        ]
        return sum(losses[1:], losses[0])

    def _draw_sizes(self) -> list[tuple[int, float]]:
        """Return the sizes of this step, with their weights; the number of the call is the seed."""
        self._calls += 1
        if not 0 < self.n_dims_per_step < len(self.parts):
            return self.parts
        return sorted(random.Random(self._calls).sample(self.parts, self.n_dims_per_step))


class WholeBatchLoss(BatchLoss, options=("group",)):
    """A loss of sentence-transformers, of the embeddings and labels of all processes.

    Args:
        loss: one of their losses with `compute_loss_from_embeddings`, such as CoSENTLoss(model).
        mini_batch_size: rows that the model takes at once, with gradient caching; None: all.
        mini_batch_num_tokens: tokens that it takes at once, instead of rows.
        group: processes that share the batch. Default: all.
    """

    fewest_columns: ClassVar[int] = 1  # their triplet losses compare the rows of one column by their labels

    loss: nn.Module
    mini_batch_size: int | None = None
    mini_batch_num_tokens: int | None = None

    def prepare(self) -> None:
        super().prepare()
        loss, name = self.loss, type(self.loss).__name__
        if isinstance(loss, type):
            raise ValueError(
                f"loss must be an instance of a loss, got the class {loss.__name__}; pass {loss.__name__}(model)"
            )
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
        if {*loss.parameters()} - {*(self.model.parameters() if isinstance(self.model, nn.Module) else ())}:
            keep_parameters()
        if self.mini_batch_size is not None or self.mini_batch_num_tokens is not None:
            self.chunk_size = chunk_size_of("their loss", self.model, self.mini_batch_size, self.mini_batch_num_tokens)

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

        def whole_loss(*arguments: Any) -> Tensor:
            *rows, targets = arguments
            if labels is not None:
                targets = targets.view(-1, *labels.shape[1:])
            if isinstance(embeddings, Tensor):
                return theirs.compute_loss_from_embeddings(rows[0], *([] if labels is None else [targets]))
            return theirs.compute_loss_from_embeddings(rows, targets)

        rows_of_labels = None if labels is None else labels.reshape(len(labels), -1)  # (1,) could be a scale
        return wb.WholeBatch(whole_loss, group=self.group)(*columns, rows_of_labels)

    @property
    def citation(self) -> str:
        """The BibTeX entry of their loss, for the model card."""
        return getattr(self.loss, "citation", "")

    def get_config_dict(self) -> dict[str, Any]:  # values of any type
        """Return the arguments, for the model card."""
        sizes = {"mini_batch_size": self.mini_batch_size, "mini_batch_num_tokens": self.mini_batch_num_tokens}
        return {"loss": type(self.loss).__name__, **sizes}
