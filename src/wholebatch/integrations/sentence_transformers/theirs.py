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


def name_of_similarity(
    similarity_fct: TokenSimilarity, names: tuple[str, str], fix: str, module: str = "sentence_transformers.util"
) -> str:
    """Return the name of a function of their module, which must be one of two; `fix` ends the error.

    Raises:
        ValueError: for any other function.
    """
    for ours in (cos_sim, pairwise_dot_score):
        if similarity_fct is ours and ours.__name__ in names:
            return ours.__name__
    for name in names:
        if similarity_fct is SENTENCE_TRANSFORMERS.find(module, name):
            return name
    raise ValueError(
        f"similarity_fct must be {' or '.join(names)} of {module}, got "
        f"{getattr(similarity_fct, '__name__', similarity_fct)!r}{fix}"
    )


def embed_columns(model: Any, columns: Sequence[Features]) -> list[Tensor]:
    """Return the embeddings of each column by their function, which joins columns of documents in one forward pass."""
    found: list[Tensor] = _of_losses("merged_forward", "embed_columns")(model, columns)
    return found


def embed_columns_padded(
    model: Any, columns: Sequence[Features], rows: int | None, task: str
) -> list[tuple[Tensor, Tensor]]:
    """Return the embeddings of each column's tokens and their masks by their function, which joins columns."""
    return [*zip(*_of_losses("merged_forward", "embed_columns_padded")(model, columns, rows, task), strict=True)]


def has_static_embedding(model: Any) -> bool:
    """Return whether the model's first module is a table of tokens, whose input has no rows."""
    return bool(_of_losses("gradcache", "has_static_embedding_input")(model))


def to_device(features: Features, device: Any) -> Features:
    """Move the tensors of a column."""
    found: Features = SENTENCE_TRANSFORMERS.find("sentence_transformers.util", "batch_to_device")(features, device)
    return found


def _of_losses(module: str, name: str) -> Any:
    return SENTENCE_TRANSFORMERS.find(f"sentence_transformers.base.losses.{module}", name)
