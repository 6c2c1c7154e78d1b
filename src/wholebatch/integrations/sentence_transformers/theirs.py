"""The names of sentence-transformers that the losses use, imported in the first call that needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .._framework import Framework

SENTENCE_TRANSFORMERS = Framework(
    "sentence_transformers", ("6.2.0",), "pip install 'sentence-transformers[train]>=6.2'"
)

Features = Mapping[str, Any]  # their tensors, and numbers such as the length of a prompt
SimilarityFunction = Callable[[Tensor, Tensor], Tensor]
TokenSimilarity = Callable[..., Tensor]  # (queries, documents, *, queries_mask, documents_mask)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosines of all pairs of rows; it stands for the function of the same name in sentence-transformers."""
    return normalize(a, dim=-1) @ normalize(b, dim=-1).T


def pairwise_dot_score(a: Tensor, b: Tensor) -> Tensor:
    """Return the products of paired rows; it stands for the function of the same name in sentence-transformers."""
    return torch.linalg.vecdot(a, b)


def is_cosine_of_pairs(similarity_fct: SimilarityFunction) -> bool:
    """Return True for cosines of paired rows, False for their products.

    Raises:
        ValueError: for any other function.
    """
    if similarity_fct is pairwise_dot_score:
        return False
    fix = "; for another function use WholeBatchLoss(model, their loss)"
    return _is_first(similarity_fct, ("pairwise_cos_sim", "pairwise_dot_score"), fix)


def is_cosine(similarity_fct: SimilarityFunction) -> bool:
    """Return True for cosines, False for dot products.

    Raises:
        ValueError: for any other function.
    """
    if similarity_fct is cos_sim:
        return True
    fix = (
        ": similarities are products of rows, in tiles across processes. For another function use "
        "WholeBatchLoss(model, their loss), which computes theirs on every process"
    )
    return _is_first(similarity_fct, ("cos_sim", "dot_score"), fix)


def is_mean_of_tokens(similarity_fct: TokenSimilarity | None) -> bool:
    """Return True for `mean_colbert_scores`, False for `colbert_scores`, which is the default.

    Raises:
        ValueError: for any other function.
    """
    if similarity_fct is None:
        return False
    fix = "; for another function use their loss"
    return _is_first(
        similarity_fct,
        ("mean_colbert_scores", "colbert_scores"),
        fix,
        "sentence_transformers.multi_vector_encoder.scoring",
    )


def _is_first(
    similarity_fct: TokenSimilarity, names: tuple[str, str], fix: str, module: str = "sentence_transformers.util"
) -> bool:
    """Return True for the first of two functions of their module, False for the second; `fix` ends the error."""
    loaded = SENTENCE_TRANSFORMERS.load(module)
    for name in names:
        if similarity_fct is getattr(loaded, SENTENCE_TRANSFORMERS.seam(loaded, name)):
            return name == names[0]
    raise ValueError(
        f"similarity_fct must be {' or '.join(names)} of {module}, got "
        f"{getattr(similarity_fct, '__name__', similarity_fct)!r}{fix}"
    )


def embed_columns(model: Any, columns: Sequence[Features]) -> list[Tensor]:
    """Return the embeddings of each column by their function, which joins columns of documents in one forward pass."""
    module = SENTENCE_TRANSFORMERS.load("sentence_transformers.base.losses.merged_forward")
    embed = getattr(module, SENTENCE_TRANSFORMERS.seam(module, "embed_columns"))
    found: list[Tensor] = embed(model, columns)
    return found


def embed_columns_padded(
    model: Any, columns: Sequence[Features], rows: int | None, task: str
) -> list[tuple[Tensor, Tensor]]:
    """Return the embeddings of each column's tokens and their masks by their function, which joins columns."""
    module = SENTENCE_TRANSFORMERS.load("sentence_transformers.base.losses.merged_forward")
    embed = getattr(module, SENTENCE_TRANSFORMERS.seam(module, "embed_columns_padded"))
    return [*zip(*embed(model, columns, rows, task), strict=True)]


def has_static_embedding(model: Any) -> bool:
    """Return whether the model's first module is a table of tokens, whose input has no rows."""
    module = SENTENCE_TRANSFORMERS.load("sentence_transformers.base.losses.gradcache")
    return bool(getattr(module, SENTENCE_TRANSFORMERS.seam(module, "has_static_embedding_input"))(model))


def to_device(features: Features, device: Any) -> Features:
    """Move the tensors of a column."""
    util = SENTENCE_TRANSFORMERS.load("sentence_transformers.util")
    found: Features = getattr(util, SENTENCE_TRANSFORMERS.seam(util, "batch_to_device"))(features, device)
    return found
