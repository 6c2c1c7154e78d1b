"""PyLate's losses with its names and arguments, over the whole batch, by :func:`wholebatch.functional.max_sim_loss`.

    from wholebatch.integrations.pylate import CachedContrastive

    loss = CachedContrastive(model)  # then SentenceTransformerTrainer(..., loss=loss), as with PyLate's

The value is that of PyLate's loss in one process on the whole batch, and the gradient is that of this value. Three
things differ: `gather_across_devices` is True by default; with it the loss is not multiplied by the number of
processes; and the gradient of the cached loss is not multiplied by the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import normalize

import wholebatch as wb

from .._base.settings import check_count, check_divisor
from ._accumulation import divide_once
from ._framework import PYLATE
from ._options import AdaptedLoss, check_no_progress_bar
from ._passages import joined

__all__ = ["CachedContrastive", "Contrastive"]


class Contrastive(AdaptedLoss):
    """PyLate's `Contrastive`, by :func:`wholebatch.functional.max_sim_loss`.

    Args:
        model: the ColBERT model that the trainer trains.
        score_metric: must be None, or PyLate's `ColBERTScores`.
        score_mini_batch_size: without effect: scores are computed in tiles.
        size_average: the mean over queries; False: their sum.
        gather_across_devices: whether negatives come from all processes. PyLate's default is False; False gives its
            loss, the mean over processes of the losses of their own batches.
        temperature: divides scores, > 0.
        options: group, exchange, memory, precision, as in :func:`wholebatch.functional.max_sim_loss`.
    """

    model: Any  # a ColBERT model, or what an engine makes of it
    score_metric: Any = None  # PyLate's
    score_mini_batch_size: int | None = None
    size_average: bool = True
    gather_across_devices: bool = True
    temperature: float = 1.0

    def prepare(self) -> None:
        PYLATE.check()
        divide_once()
        if self.score_metric is not None and type(self.score_metric).__name__ != "ColBERTScores":
            raise ValueError(
                f"score_metric must be None or PyLate's ColBERTScores, got {self.score_metric!r}; for others use "
                "PyLate's loss"
            )
        check_divisor("temperature", self.temperature)

    def forward(self, sentence_features: Sequence[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch, the same on all processes; labels are without effect."""
        columns = [*sentence_features]
        masks_of = PYLATE.find("pylate.losses.contrastive", "extract_skiplist_mask")
        model = self.model if hasattr(self.model, "skiplist") else self.model.module
        masks = masks_of(sentence_features=columns, skiplist=model.skiplist)
        embeddings = [self.embed(features) for features in columns]
        return self.compute_loss_from_tokens(embeddings, masks, every_query_token=bool(model.do_query_expansion))

    def embed(self, features: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of a column's tokens, of norm 1."""
        return _embeddings(self.model(features))

    def compute_loss_from_tokens(
        self, embeddings: Sequence[Tensor], masks: Sequence[Tensor], *, every_query_token: bool
    ) -> Tensor:
        """Return the loss of the whole batch for this process's tokens: (b, tokens, d) and (b, tokens) for each column.

        Columns are anchors, positives, negatives. `every_query_token`: queries are scored without their mask, as with
        query expansion.
        """
        documents = [*zip(embeddings[1:], masks[1:], strict=True)]
        return wb.functional.max_sim_loss(
            embeddings[0],
            joined([x * mask[..., None] for x, mask in documents]),
            logit_scale=1 / self.temperature,
            query_mask=None if every_query_token else masks[0].bool(),
            document_mask=joined([_keep_one_zero(mask) for _, mask in documents]),
            reduction="mean" if self.size_average else "sum",
            **self.options,
        )


class CachedContrastive(
    Contrastive,
    positional="model score_metric mini_batch_size score_mini_batch_size size_average gather_across_devices "
    "show_progress_bar temperature",
):
    """PyLate's `CachedContrastive`: embeddings come from :func:`wholebatch.gradcache.encode`.

    Beside the arguments of :class:`Contrastive` it takes `mini_batch_size`, rows that the model takes at once.
    """

    mini_batch_size: int = 32
    show_progress_bar: bool = False

    def prepare(self) -> None:
        super().prepare()
        check_no_progress_bar(self.show_progress_bar)
        check_count("mini_batch_size", self.mini_batch_size, "rows that the model takes at once")

    def embed(self, features: dict[str, Tensor]) -> Tensor:
        """Return the embeddings of a column's tokens, of norm 1, chunk by chunk."""
        return wb.gradcache.encode(self.model, [features], self.mini_batch_size, get_rep_fn=_embeddings)


def _embeddings(outputs: dict[str, Tensor]) -> Tensor:
    return normalize(outputs["token_embeddings"], dim=-1)


def _keep_one_zero(mask: Tensor) -> Tensor:
    """Return the mask with the first token that is left out, if there is one.

    PyLate multiplies scores by masks before it takes the maximum, so a document with padding has tokens with score 0,
    as those of a zero vector; one of them is as good as all. A column's longest document has no padding.
    """
    left_out = ~mask.bool()
    return ~left_out | (left_out & (left_out.cumsum(1) == 1))
