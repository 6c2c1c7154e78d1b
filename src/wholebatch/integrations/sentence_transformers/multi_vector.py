"""Late interaction of multi-vector models, with their arguments, by :func:`wholebatch.functional.max_sim_loss`.

Columns are (anchor, positive, negative_1, ..., negative_n); the negatives of all anchors are negatives of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

import wholebatch as wb

from ..._base.settings import check_count
from .._passages import joined
from .embedding import (
    BatchLoss,
    CachedBatchLoss,
    Features,
    TokenSimilarity,
    check_scale,
    columns_of,
    loss_function,
    name_of_similarity,
)

TokensAndMask = tuple[Tensor, Tensor]  # embeddings (b, t, d), and where there is one, (b, t)


class MultiVectorMultipleNegativesRankingLoss(BatchLoss, positional="model"):
    """Their `MultiVectorMultipleNegativesRankingLoss`, by :func:`wholebatch.functional.max_sim_loss`.

    Args:
        scale: multiplies scores: a positive number, or a :class:`wholebatch.Scale`, which is then trained.
        similarity_fct: `colbert_scores` or `mean_colbert_scores` of their multi_vector_encoder.scoring. Default: the
            first.
        mini_batch_size: rows of documents that the model takes at once; their activations are kept. Default: all.
        score_mini_batch_size: without effect: scores are computed in tiles.
    """

    their_losses: ClassVar[str] = "sentence_transformers.multi_vector_encoder.losses"

    scale: float | wb.Scale = 1.0
    similarity_fct: TokenSimilarity | None = None
    mini_batch_size: int | None = None
    score_mini_batch_size: int | None = None
    gather_across_devices: bool = True

    def prepare(self) -> None:
        super().prepare()
        self.similarity = "colbert_scores"
        if self.similarity_fct is not None:
            names, fix = ("mean_colbert_scores", "colbert_scores"), "; for another function use their loss"
            module = "sentence_transformers.multi_vector_encoder.scoring"
            self.similarity = name_of_similarity(self.similarity_fct, names, fix, module)
        check_scale(self.scale)
        for name in ("mini_batch_size", "score_mini_batch_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "rows")

    def forward(self, sentence_features: Iterable[Features], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch, the same on all processes; labels are without effect."""
        columns = [
            {**features, "task": features.get("task", "document" if number else "query")}
            for number, features in enumerate(columns_of(sentence_features))
        ]
        embeddings, masks = zip(*self.embed_tokens(columns), strict=True)
        return self.compute_loss_from_tokens(embeddings, masks)

    def embed_tokens(self, columns: Sequence[Features]) -> list[TokensAndMask]:
        """Return the embeddings of each column's tokens, and which of them are scored."""
        embed = loss_function("merged_forward", "embed_columns_padded")
        queries = embed(self.model, columns[:1], None, "query")
        documents = embed(self.model, columns[1:], self.mini_batch_size, "document")
        return [*zip(*queries, strict=True), *zip(*documents, strict=True)]

    def compute_loss_from_tokens(self, embeddings: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
        """Return the loss of the whole batch for this process's tokens.

        Args:
            embeddings: (b, tokens, d) for each column: anchors, positives, negatives if there are any.
            masks: (b, tokens) booleans for each column: True for the tokens that are scored.
        """
        return wb.functional.max_sim_loss(
            embeddings[0],
            joined(embeddings[1:]),
            logit_scale=self.scale_value(),
            query_mask=masks[0],
            document_mask=joined(masks[1:]),
            token_reduction="mean" if self.similarity == "mean_colbert_scores" else "sum",
            **self.options_of_call,
        )


class CachedMultiVectorMultipleNegativesRankingLoss(
    CachedBatchLoss, MultiVectorMultipleNegativesRankingLoss, positional="model"
):
    """Their `CachedMultiVectorMultipleNegativesRankingLoss`: embeddings come from :func:`wholebatch.gradcache.encode`.

    Beside the arguments of :class:`MultiVectorMultipleNegativesRankingLoss` it takes those of
    :class:`CachedMultipleNegativesRankingLoss`.
    """

    def embed_tokens(self, columns: Sequence[Features]) -> list[TokensAndMask]:
        """Return the embeddings of each column's tokens, and which of them are scored, chunk by chunk."""
        assert self.chunk_size is not None
        tokens = []
        for features in columns:
            inputs = [features], {"task": features["task"]}
            with_mask = partial(_append_mask, features["attention_mask"].shape[1])
            chunks = wb.gradcache.encode(self.model, inputs, self.chunk_size, get_rep_fn=with_mask)
            tokens.append((chunks[..., :-1], chunks[..., -1].detach() > 0.5))
        return tokens


def _append_mask(width: int, outputs: Features) -> Tensor:
    """Return embeddings with one more number, 1 for the tokens that are scored, in the padded width of all chunks."""
    embeddings, mask = outputs["token_embeddings"], outputs["attention_mask"].bool()
    both = torch.cat([embeddings, mask[..., None].to(embeddings.dtype)], -1)
    return pad(both, (0, 0, 0, max(width - both.shape[1], 0)))
