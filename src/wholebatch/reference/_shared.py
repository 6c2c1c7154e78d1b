"""The parts that several reference implementations are made of."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .._base.normalize import EPS, normalize_rows
from .._base.settings import check_label

NO_ID = torch.iinfo(torch.int64).min


def check_shapes(
    caller: str, matrices: Mapping[str, Tensor | None], *vectors: Tensor | None, paired: bool = True
) -> None:
    """Raise unless matrices have one width, and one length if paired, and vectors have the length of the first matrix.

    Raises:
        TypeError: for a matrix that is no tensor.
        ValueError: for another shape.
    """
    tensors = {name: x for name, x in matrices.items() if x is not None}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{caller}: {name} must be a tensor of shape (rows, embedding size), got {type(x).__name__}"
            )
        if x.dim() != 2 or not x.is_floating_point():
            raise ValueError(
                f"{caller}: {name} must be floating-point, (rows, embedding size), got {x.dtype}, {x.shape}"
            )
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        if x.shape[1] != first.shape[1] or (paired and len(x) != len(first)):
            label = "shape" if paired else "embedding size"
            raise ValueError(f"{caller}: {name} must have {first_name}'s {label}, got {x.shape} and {first.shape}")
    for vector in vectors:
        if vector is not None and (not isinstance(vector, Tensor) or vector.shape[:1] != first.shape[:1]):
            got = vector.shape if isinstance(vector, Tensor) else type(vector).__name__
            raise ValueError(f"{caller}: ids and weights must have one entry for each of {len(first)} rows, got {got}")


def cross_entropy(
    logits: Tensor,
    positive: Tensor,
    excluded: Tensor,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return each row's logsumexp over the entries not excluded minus its mean positive; 0 for a row without positives.

    Logits are taken relative to the largest. The derivative of a logsumexp is exp(S - logsumexp), and a logsumexp of
    1e16 is too coarse for it.
    """
    candidates = (~excluded).sum(1)
    largest = logits.detach().masked_fill(excluded, -torch.inf).amax(1, keepdim=True)
    logits = logits - torch.where(candidates[:, None] > 0, largest, 0.0)
    logsumexp = logits.masked_fill(excluded, -torch.inf).logsumexp(1)
    count = positive.sum(1)
    mean = logits.masked_fill(~positive, 0).sum(1) / count.clamp(min=1)
    loss = logsumexp - (1 - label_smoothing) * mean
    if label_smoothing:
        loss = loss - label_smoothing * logits.masked_fill(excluded, 0).sum(1) / candidates.clamp(min=1)
    return torch.where((candidates > 0) & (count > 0), loss, 0.0)


def positives_and_excluded(n: int, ids: Tensor | None, equal_ids: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return which entries are positive and which are excluded, (n, n) each."""
    diagonal = torch.eye(n, dtype=torch.bool, device=device)
    return with_equal(diagonal, diagonal if ids is None else ids[:, None] == ids, equal_ids)


def with_equal(pairs: Tensor, equal: Tensor, equal_ids: str) -> tuple[Tensor, Tensor]:
    """Return which entries are positive and which are excluded: other entries with equal ids are one of the two."""
    return (pairs | equal, equal & ~equal) if equal_ids == "positive" else (pairs, equal & ~pairs)


def retrieval_ids(
    query_ids: Tensor | None, key_ids: Tensor | None, positives: Tensor, keys: int
) -> tuple[Tensor, Tensor]:
    """Return the ids of queries and of keys, NO_ID where nothing is equal.

    A query and its positive, whose index `positives` has, share one unless both are given.
    """
    q_ids, k_ids = (torch.full((count,), NO_ID, device=positives.device) for count in (len(positives), keys))
    if key_ids is not None:
        k_ids[:] = key_ids
        q_ids[:] = key_ids[positives]
    if query_ids is not None:
        q_ids[:] = query_ids
        if key_ids is None:
            k_ids[positives] = q_ids
    return q_ids, k_ids


def normalized(x: Tensor, eps: float = EPS) -> Tensor:
    """Return rows as `torch.nn.functional.normalize` does, also where squares of their entries overflow."""
    return normalize_rows(x, eps).to(x.dtype)


def two_view_logits(
    z0: Tensor, z1: Tensor, temperature: Tensor | float, ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of normalized rows, which entries are the other view, and which are no negatives beside it."""
    check_shapes("a loss of two views", {"z0": z0, "z1": z1}, ids)
    z = normalized(torch.cat([z0, z1]))
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    other = itself.roll(len(z0), 0)
    excluded = itself if ids is None else (ids.repeat(2)[:, None] == ids.repeat(2)) & ~other
    return z @ z.T / temperature, other, excluded


def labeled_cosines(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cosines of all rows (and views), which entries have the same label, and the diagonal."""
    if isinstance(features, Tensor) and features.dim() == 3:
        features, labels = features.flatten(0, 1), labels.repeat_interleave(features.shape[1])
    check_shapes("a loss of labeled rows", {"features": features}, labels)
    check_label(int(labels.amin()) if len(labels) else 0)
    z = normalized(features)
    itself = torch.eye(len(z), dtype=torch.bool, device=z.device)
    return z @ z.T, (labels[:, None] == labels) & ~itself, itself


def reduce(losses: Tensor, weights: Tensor | None, reduction: str, counted: Tensor | None = None) -> Tensor:
    """Return the weighted losses, (B,), their sum, or their mean over the rows that count."""
    if weights is None:
        weights = torch.ones_like(losses)
    if weights.numel() < len(losses):  # one for each example of several views
        weights = weights.repeat_interleave(len(losses) // len(weights))
    weights = weights.flatten()
    if counted is not None:
        weights = weights * counted
    losses = weights * losses
    if reduction == "none":
        return losses
    return losses.sum() / (1 if reduction == "sum" or not weights.any() else weights.sum())
