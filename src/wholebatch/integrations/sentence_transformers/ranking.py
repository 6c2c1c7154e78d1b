"""Cross-entropy of each anchor's positive among the documents of the whole batch, with their arguments.

Columns are (anchor, positive, negative_1, ..., negative_n). All of the numerics are those of
:func:`wholebatch.functional.info_nce_loss`: positives are its keys, and negatives its `negatives`. Where a setting
treats an anchor's own negatives apart, they are its `hard_negatives`, and ids keep them out of the pool of the others.

With GIST a guide, another model, says which negatives are false. Anchor a_i, positive p_i, guide's cosine g. A negative
x of anchor i is left out if

    g(i, x) > g(a_i, p_i) - margin                      "absolute"
    g(i, x) > g(a_i, p_i) - margin |g(a_i, p_i)|        "relative"

which are `exclude_above` and `exclude_relative`. Anchors among themselves and positives among themselves are the
directions query_to_query and key_to_key. The latter also compares positives with negatives, which GIST does not; one
more number in the guide's features makes these pairs so similar that they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

import wholebatch as wb

from ..._base.settings import check_choice, check_divisor, check_number, check_weight
from ...comm import Group
from .._framework import SENTENCE_TRANSFORMERS
from .embedding import (
    BatchLoss,
    CachedBatchLoss,
    Features,
    SimilarityFunction,
    check_scale,
    cos_sim,
    embed_columns,
    has_static_embedding,
    name_of_similarity,
)

Directions = tuple[Literal["query_to_doc", "query_to_query", "doc_to_query", "doc_to_doc"], ...]
PartitionMode = Literal["joint", "per_direction"]
HardnessMode = Literal["in_batch_negatives", "hard_negatives", "all_negatives"] | None

_DIRECTIONS = {
    "query_to_doc": "query_to_key",
    "query_to_query": "query_to_query",
    "doc_to_query": "key_to_query",
    "doc_to_doc": "key_to_key",
}
_HARDNESS_MODES = ("in_batch_negatives", "hard_negatives", "all_negatives")
_SYMMETRIC: Directions = ("query_to_doc", "doc_to_query")


class MultipleNegativesRankingLoss(BatchLoss):
    """Their `MultipleNegativesRankingLoss`, by :func:`wholebatch.functional.info_nce_loss`.

    Args:
        scale: multiplies similarities: a positive number, or a :class:`wholebatch.Scale`, which is then trained.
        similarity_fct: `cos_sim` or `dot_score` of sentence_transformers.util.
        directions, partition_mode, hardness_mode, hardness_strength: as theirs.
    """

    scale: float | wb.Scale = 20.0
    similarity_fct: SimilarityFunction = cos_sim
    gather_across_devices: bool = True
    directions: Directions = ("query_to_doc",)
    partition_mode: PartitionMode = "joint"
    hardness_mode: HardnessMode = None
    hardness_strength: float = 0.0

    def prepare(self) -> None:
        super().prepare()
        fix = (
            ": similarities are products of rows, in tiles across processes. For another function use "
            "WholeBatchLoss(model, their loss), which computes theirs on every process"
        )
        self.similarity = name_of_similarity(self.similarity_fct, ("cos_sim", "dot_score"), fix)
        check_scale(self.scale)
        self.directions = _check_directions(self.directions, self.partition_mode)
        if self.hardness_mode is not None:
            check_choice("hardness_mode", self.hardness_mode, _HARDNESS_MODES)
        check_weight("hardness_strength", self.hardness_strength, "0 turns it off")

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """Return the loss of the whole batch for this process's embeddings.

        Args:
            embeddings: (b, d) for each column: anchors, positives, negatives if there are any.
            labels: without effect.
        """
        cosine, options = self.similarity == "cos_sim", self.options_of_call
        queries, keys, *negatives = [normalize(x, dim=-1) if cosine else x for x in embeddings]
        return wb.functional.info_nce_loss(
            queries,
            keys,
            logit_scale=self.scale_value(),
            negatives=torch.cat([keys[:0], *negatives]),
            directions=[_DIRECTIONS[name] for name in self.directions],  # type: ignore[misc]
            partition=self.partition_mode,
            hardness=self._hardness("in_batch_negatives"),
            **self._apart(queries, negatives, options.get("group")),
            **options,
        )

    @property
    def symmetric(self) -> bool | None:
        """Whether both directions of pairs are compared, as in CLIP; None for settings beyond that."""
        if self.hardness_mode is not None and self.hardness_strength:
            return None
        one_way = self.directions == ("query_to_doc",)
        both = set(self.directions) == set(_SYMMETRIC) and self.partition_mode == "per_direction"
        return both if one_way or both else None

    def _hardness(self, mode: str) -> float:
        return self.hardness_strength if self.hardness_mode in (mode, "all_negatives") else 0.0

    def _apart(self, queries: Tensor, negatives: Sequence[Tensor], group: Group) -> dict[str, Any]:
        """Return the arguments that treat an anchor's own negatives apart from the others, if a setting does.

        An id for each row of the whole batch excludes an anchor's own negatives from the pool, in all directions.
        """
        own_hardness, pool_hardness = self._hardness("hard_negatives"), self._hardness("in_batch_negatives")
        if "doc_to_doc" not in self.directions and own_hardness == pool_hardness:
            return {}
        comm, b = wb.comm.select_communicator(group), len(queries)
        ids = comm.rank * 2**40 + torch.arange(b, device=queries.device)
        return {
            "query_ids": ids,
            "key_ids": ids,
            "negative_ids": ids.repeat(len(negatives)),
            "hard_negatives": torch.stack([queries, *negatives], dim=1)[:, 1:],
            "hard_negative_hardness": own_hardness,
        }

    @property
    def temperature(self) -> float:
        """1 / scale."""
        return 1.0 / self.scale_number()


class MultipleNegativesSymmetricRankingLoss(
    MultipleNegativesRankingLoss,
    fixed={
        "directions": _SYMMETRIC,
        "partition_mode": "per_direction",
        "hardness_mode": None,
        "hardness_strength": 0.0,
    },
):
    """Their `MultipleNegativesSymmetricRankingLoss`: anchors to documents and positives to anchors, averaged.

    Its arguments are the first ones of :class:`MultipleNegativesRankingLoss`, and the options.
    """


class CachedMultipleNegativesRankingLoss(
    CachedBatchLoss,
    MultipleNegativesRankingLoss,
    positional="model scale similarity_fct mini_batch_size mini_batch_num_tokens gather_across_devices directions "
    "partition_mode show_progress_bar hardness_mode hardness_strength",
):
    """Their `CachedMultipleNegativesRankingLoss`: embeddings come from :func:`wholebatch.gradcache.encode`.

    Beside the arguments of :class:`MultipleNegativesRankingLoss` it takes `mini_batch_size`, rows that the model takes
    at once, 32 by default, or `mini_batch_num_tokens`, tokens that it takes at once, by a
    :class:`wholebatch.gradcache.TokenBudget`: padding counts, and rows are grouped by length; theirs counts tokens
    without padding, of rows in their order. `show_progress_bar` must be False.
    """


class CachedMultipleNegativesSymmetricRankingLoss(
    CachedMultipleNegativesRankingLoss,
    MultipleNegativesSymmetricRankingLoss,
    positional="model scale similarity_fct mini_batch_size mini_batch_num_tokens gather_across_devices "
    "show_progress_bar",
):
    """Their `CachedMultipleNegativesSymmetricRankingLoss`, with arguments of `CachedMultipleNegativesRankingLoss`."""


def _check_directions(directions: Any, partition_mode: Any) -> Directions:
    """Return each direction once; raise ValueError for those that are unknown or do not go with the partition."""
    names: Directions = tuple(directions) if isinstance(directions, tuple | list) else (directions,)
    for name in names:
        check_choice("directions", name, tuple(_DIRECTIONS))
    if "query_to_doc" not in names:
        raise ValueError(f"directions must have 'query_to_doc' among them, got {names}; it has the positive pairs")
    without = [name for name in ("query_to_query", "doc_to_doc") if name in names]
    if check_choice("partition_mode", partition_mode, ("joint", "per_direction")) == "per_direction" and without:
        raise ValueError(
            f"partition_mode='per_direction' does not go with {', '.join(without)} in directions: a softmax of its own "
            "needs positive pairs; use partition_mode='joint'"
        )
    return tuple(dict.fromkeys(names))


MarginStrategy = Literal["absolute", "relative"]
_TINY = 2.0**-30  # its square is below the rounding of a cosine, in float64 too


class GISTEmbedLoss(BatchLoss):
    """Their `GISTEmbedLoss`, by :func:`wholebatch.functional.info_nce_loss`.

    Args:
        guide: the model that decides which negatives are left out.
        temperature: divides cosines, > 0.
        margin_strategy, margin, contrast_anchors, contrast_positives: as theirs.
        gather_across_devices: whether negatives come from all processes. Theirs is False by default, and with True
            compares anchors among themselves on each process alone; here True compares all with all.
    """

    guide: Any  # their model
    temperature: float = 0.01
    margin_strategy: MarginStrategy = "absolute"
    margin: float = 0.0
    contrast_anchors: bool = True
    contrast_positives: bool = True
    gather_across_devices: bool = True

    def prepare(self) -> None:
        super().prepare()
        model, guide = self.model, self.guide
        check_divisor("temperature", self.temperature)
        check_choice("margin_strategy", self.margin_strategy, ("absolute", "relative"))
        check_number("margin", self.margin)
        self.tokenizer = _tokenizer("model", model)
        self.must_retokenize = (
            self.tokenizer.get_vocab() != _tokenizer("guide", guide).get_vocab()
            or guide.max_seq_length < model.max_seq_length
        )
        if self.must_retokenize and has_static_embedding(model):
            raise ValueError(
                "guide must have the tokenizer of a model that is based on a StaticEmbedding, got another: the rows of "
                "such a model's input cannot be turned into text again"
            )

    def beside(self, columns: Sequence[Features], labels: Tensor | None) -> list[Tensor]:
        """Return the guide's embeddings of each column, normalized, in at least float32."""
        with torch.no_grad():
            guided = [self._for_the_guide(dict(features)) for features in columns]
            embeddings = embed_columns(self.guide, guided, self.chunk_size)
            return [normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1) for x in embeddings]

    def _for_the_guide(self, features: Features) -> Features:
        if not self.must_retokenize:
            return features
        rows = features["input_ids"]
        if "cu_seq_lens_q" in features:  # rows without padding, one after another
            ends = features["cu_seq_lens_q"].tolist()
            rows = [rows[0, start:end] for start, end in pairwise(ends)]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        to_device = SENTENCE_TRANSFORMERS.find("sentence_transformers.util", "batch_to_device")
        return to_device(self.guide.preprocess(texts), self.guide.device)

    def compare(self, embeddings: Sequence[Tensor], beside: Any) -> Tensor:  # whatever `beside` returns
        """Return the loss of the whole batch for this process's embeddings, and the guide's beside them."""
        queries, keys, *negatives = [normalize(x, dim=-1) for x in embeddings]
        directions = ["query_to_key"]
        directions += ["query_to_query"] * self.contrast_anchors + ["key_to_key"] * self.contrast_positives
        query_guides, key_guides, *negative_guides = beside
        beyond = (4 + 2 * abs(self.margin)) / _TINY
        return wb.functional.info_nce_loss(
            queries,
            keys,
            logit_scale=1 / self.temperature,
            negatives=torch.cat([keys[:0], *negatives]),
            directions=directions,  # type: ignore[arg-type]
            exclude_above=-float(self.margin),
            exclude_relative=self.margin_strategy == "relative",
            query_guides=pad(query_guides, (0, 1)),
            key_guides=torch.cat(
                [pad(key_guides, (0, 1), value=_TINY), *(pad(x, (0, 1), value=beyond) for x in negative_guides)]
            ),
            **self.options_of_call,
        )


class CachedGISTEmbedLoss(
    CachedBatchLoss,
    GISTEmbedLoss,
    positional="model guide temperature mini_batch_size mini_batch_num_tokens show_progress_bar margin_strategy margin "
    "contrast_anchors contrast_positives gather_across_devices",
):
    """Their `CachedGISTEmbedLoss`: embeddings come from :func:`wholebatch.gradcache.encode`, the guide's as well.

    Beside the arguments of :class:`GISTEmbedLoss` it takes those of :class:`CachedMultipleNegativesRankingLoss`.
    """


def _tokenizer(name: str, model: Any) -> Any:
    tokenizer = getattr(model, "tokenizer", None)
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "batch_decode"):
        raise ValueError(
            f"{name} must have a tokenizer of transformers, got {type(tokenizer).__name__}: the guide reads the texts "
            "of the model, and their vocabularies decide whether it must tokenize them again"
        )
    return tokenizer
