"""Verification of pairs of images, and the largest accuracy that equal pictures allow."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..data.randomness import seeded

FAR = 1e-3
"""The false accept rate of the reports."""
_ROWS = 512
_MOST = 10_000
"""Images whose pairs are compared: the time grows with their square."""


def verify(features: Tensor, labels: Tensor, device: torch.device | str) -> dict[str, Any]:
    """Return the figures of the verification of these unit rows (n, d) of classes (n,); None without pairs."""
    rows = rows_to_verify(labels)
    tar, threshold = accepted_at(features[rows], labels[rows], FAR, device=device)
    has_pairs = not math.isnan(tar)
    return {
        "images": len(rows), "far": FAR, "tar": tar if has_pairs else None,
        "threshold": threshold if has_pairs else None,
    }  # fmt: skip


def rows_to_verify(labels: Tensor) -> Tensor:
    """Return the rows (m,), in order, whose pairs are to be compared: all (n,), or about 10,000 of more.

    These are all rows of random classes, so that there are pairs of one class; of few large classes random rows.
    """
    if len(labels) <= _MOST:
        return torch.arange(len(labels))
    _, of_class, sizes = torch.unique(labels, return_inverse=True, return_counts=True)
    order = torch.randperm(len(labels), generator=seeded("rows to verify"))
    order = order[of_class[order].argsort(stable=True)]
    place = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[of_class[order]]
    order = order[place < max(2, _MOST // len(sizes))]
    turn = torch.randperm(len(sizes), generator=seeded("classes to verify"))
    return order[turn[of_class[order]].argsort(stable=True)][:_MOST].sort().values


def accepted_at(
    features: Tensor, labels: Tensor, far: float, *, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """Return (TAR, threshold): the fraction of same-class pairs above the threshold that `far` of other pairs pass.

    Args:
        features: (n, d), unit rows.
        labels: (n,).
        far: false accept rate, the fraction of all pairs of different classes.
        device: where similarities are computed. It holds all features, and the similarities of pairs of one class.

    >>> x = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    >>> accepted_at(x, torch.tensor([0, 0, 1, 1]), 0.25)  # others: 0, 0, 0.6, 0.6; one of four may be accepted
    (1.0, 0.6000000238418579)
    """
    n = len(labels)
    same_pairs = int((torch.bincount(labels.unique(return_inverse=True)[1]).pow(2).sum() - n) // 2)
    other_pairs = n * (n - 1) // 2 - same_pairs
    allowed = int(far * other_pairs)
    if not same_pairs or not other_pairs:
        return float("nan"), float("nan")
    features, labels = features.to(device), labels.to(device)
    same, others, places = [], features.new_empty(0), torch.arange(n, device=device)
    for start in range(0, n, _ROWS):
        similarity = features[start : start + _ROWS] @ features.T
        later = places > places[start : start + len(similarity), None]
        alike = labels[start : start + _ROWS, None] == labels
        same.append(similarity[later & alike])
        others = torch.cat([others, similarity[later & ~alike]])
        others = others.topk(min(len(others), allowed + 1)).values  # those that may be accepted, and one more
    threshold = others[-1].item()
    return (torch.cat(same) > threshold).double().mean().item(), threshold


def best_possible(numbers: Sequence[int], labels: Tensor) -> float:
    """Return the largest accuracy of a method that sees only the pictures: equal ones get equal answers.

    Args:
        numbers: of n pictures, equal for equal pictures.
        labels: (n,).
    """
    classes: dict[int, Counter[int]] = defaultdict(Counter)
    for number, label in zip(numbers, labels.tolist(), strict=True):
        classes[number][label] += 1
    return sum(max(counts.values()) for counts in classes.values()) / len(labels)
