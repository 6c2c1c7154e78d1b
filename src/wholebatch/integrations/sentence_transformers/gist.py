"""GIST: a guide, another model, says which negatives are false; by :func:`wholebatch.functional.info_nce_loss`.

Anchor a_i, positive p_i, guide's cosine g. A negative x of anchor i is left out if

    g(i, x) > g(a_i, p_i) - margin                      "absolute"
    g(i, x) > g(a_i, p_i) - margin |g(a_i, p_i)|        "relative"

which are its `exclude_above` and `exclude_relative`. Anchors among themselves and positives among themselves are its
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
from typing_extensions import Unpack

import wholebatch as wb

from ..._base.settings import check_choice, check_divisor, check_number
from ...contract import BatchOptions
from .._options import with_options
from .citations import GIST
from .embedding import (
    SENTENCE_TRANSFORMERS,
    BatchLoss,
    CachedBatchLoss,
    Features,
    embed_columns,
    has_static_embedding,
    in_chunks,
)

MarginStrategy = Literal["absolute", "relative"]
_TINY = 2.0**-30  # its square is below the rounding of a cosine, in float64 too


class GISTEmbedLoss(BatchLoss):
    """Their `GISTEmbedLoss`, by :func:`wholebatch.functional.info_nce_loss`.

    Args:
        model: the model that the trainer trains.
        guide: the model that decides which negatives are left out.
        temperature: divides cosines, > 0.
        margin_strategy, margin, contrast_anchors, contrast_positives: as theirs.
        gather_across_devices: whether negatives come from all processes. Theirs is False by default, and with True
            compares anchors among themselves on each process alone; here True compares all with all.
        options: group, exchange, memory, precision, as in :func:`wholebatch.functional.info_nce_loss`.

    Raises:
        ValueError: for values that theirs refuses.
        ImportError: if sentence-transformers is missing or too old.
    """

    citation = GIST
    card = (
        *("guide", "temperature", "margin_strategy", "margin"),
        *("contrast_anchors", "contrast_positives", "gather_across_devices"),
    )

    @with_options()
    def __init__(
        self,
        model: Any,  # their model
        guide: Any,  # their model
        temperature: float = 0.01,
        margin_strategy: MarginStrategy = "absolute",
        margin: float = 0.0,
        contrast_anchors: bool = True,
        contrast_positives: bool = True,
        gather_across_devices: bool = True,
        **options: Unpack[BatchOptions],
    ) -> None:
        super().__init__(model, gather_across_devices, **options)
        check_divisor("temperature", temperature)
        check_choice("margin_strategy", margin_strategy, ("absolute", "relative"))
        check_number("margin", margin)
        self.guide, self.temperature, self.margin_strategy, self.margin = guide, temperature, margin_strategy, margin
        self.contrast_anchors, self.contrast_positives = contrast_anchors, contrast_positives
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
            found = (self.chunks or embed_columns)(self.guide, guided)
            return [normalize(x.to(torch.promote_types(x.dtype, torch.float32)), dim=-1) for x in found]

    def _for_the_guide(self, features: Features) -> Features:
        if not self.must_retokenize:
            return features
        rows = features["input_ids"]
        if "cu_seq_lens_q" in features:  # rows without padding, one after another
            ends = features["cu_seq_lens_q"].tolist()
            rows = [rows[0, start:end] for start, end in pairwise(ends)]
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        to_device = SENTENCE_TRANSFORMERS.find("sentence_transformers.util", "batch_to_device")
        found: Features = to_device(self.guide.preprocess(texts), self.guide.device)
        return found

    def compare(self, embeddings: Sequence[Tensor], beside: Any) -> Tensor:  # whatever `beside` returns
        """Return the loss of the whole batch for this process's embeddings, and the guide's beside them."""
        queries, keys, *negatives = [normalize(x, dim=-1) for x in embeddings]
        directions = ["query_to_key"]
        directions += ["query_to_query"] * self.contrast_anchors + ["key_to_key"] * self.contrast_positives
        of_queries, of_keys, *of_negatives = beside
        beyond = (4 + 2 * abs(self.margin)) / _TINY
        return wb.functional.info_nce_loss(
            queries,
            keys,
            logit_scale=1 / self.temperature,
            negatives=torch.cat([keys[:0], *negatives]),
            directions=directions,  # type: ignore[arg-type]
            exclude_above=-float(self.margin),
            exclude_relative=self.margin_strategy == "relative",
            query_guides=pad(of_queries, (0, 1)),
            key_guides=torch.cat(
                [pad(of_keys, (0, 1), value=_TINY), *(pad(x, (0, 1), value=beyond) for x in of_negatives)]
            ),
            **self.options_of_call,
        )


class CachedGISTEmbedLoss(CachedBatchLoss, GISTEmbedLoss):
    """Their `CachedGISTEmbedLoss`: embeddings come from :func:`wholebatch.gradcache.encode`, the guide's as well.

    Beside the arguments of :class:`GISTEmbedLoss` it takes those of :class:`CachedMultipleNegativesRankingLoss`.
    """

    __init__ = in_chunks(
        GISTEmbedLoss,
        "model guide temperature mini_batch_size mini_batch_num_tokens show_progress_bar margin_strategy margin "
        "contrast_anchors contrast_positives gather_across_devices",
    )


def _tokenizer(name: str, model: Any) -> Any:
    found = getattr(model, "tokenizer", None)
    if not hasattr(found, "get_vocab") or not hasattr(found, "batch_decode"):
        raise ValueError(
            f"{name} must have a tokenizer of transformers, got {type(found).__name__}: the guide reads the texts "
            "of the model, and their vocabularies decide whether it must tokenize them again"
        )
    return found
