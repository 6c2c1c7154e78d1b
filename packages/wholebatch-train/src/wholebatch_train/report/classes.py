"""The evidence of a classifier: examples, mistakes, classes that look alike, and similarities of pairs of images."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data.classes.labeled import LabeledImages
from ..data.randomness import seeded
from .content import Candidate, Evidence, Gallery, Item, Query
from .search import shown_rows

_SHOWN, _TOP = 12, 5
_MOST_PAIRS, _ROWS_OF_PAIRS = 100_000, 448

Items = Callable[[int], Item]


def classes_evidence(
    embeddings: Tensor,
    labels: Tensor,
    top: Tensor,
    similarities: Tensor,
    surest: Sequence[int],
    of_example: Items,
    of_class: Items,
) -> Evidence:
    """Return the evidence of a classifier from its test examples.

    Args:
        embeddings: (n, d), unit rows.
        labels: (n,), the true class.
        top: (n, k), the k best classes, the best one first.
        similarities: (n, k), theirs.
        surest: examples with a wrong class, the surest first.
        of_example: the item of an example.
        of_class: the item of a class.
    """

    def query(row: int) -> Query:
        best, true = top[row].tolist(), int(labels[row])
        candidates = [
            Candidate(of_class(label), similarity, label == true)
            for label, similarity in zip(best, similarities[row].tolist(), strict=True)
        ]
        missed = None if true in best else Candidate(of_class(true), None, True)
        return Query(of_example(row), candidates, None if missed else best.index(true) + 1, missed)

    first = int((top[:, 0] == labels).sum())
    rows = shown_rows(len(labels))
    galleries = [
        Gallery(
            "Images → classes",
            f"{len(rows)} of {len(labels):,} test images, drawn at random, each with the {top.shape[1]} most similar "
            f"classes: a training image of each, and its cosine. The right class comes first for {first:,} of all.",
            [query(row) for row in rows],
        )
    ]
    if len(surest):
        note = "Wrong classes with the largest cosine, about pictures that differ; each pair of classes once."
        galleries.append(Gallery("Surest mistakes", note, [query(row) for row in surest[:_SHOWN]]))
    alike = _look_alikes(labels, top[:, 0], of_class)
    if alike:
        note = (
            "The classes with the most confusions: beside each, the classes that its test images were taken for, and "
            "for which fraction of them."
        )
        galleries.append(Gallery("Look-alikes", note, alike))
    positives, negatives = pair_similarities(embeddings, labels)
    note = (
        f"Cosines between test images: {len(positives):,} pairs of one class, and {len(negatives):,} random pairs of "
        "different classes."
    )
    return Evidence(galleries, positives, negatives, note)


def surest_mistakes(data: LabeledImages, predicted: Tensor, logits: Tensor) -> list[int]:
    """Return the test images with a wrong class, which has no equal image: the surest first, each pair once.

    Args:
        data: labeled images, with the test images among them.
        predicted: (n,), the class that was found for each test image.
        logits: (n,), its similarity.
    """
    labels, numbers = data.labels[data.test], data.numbers[data.test]
    known = {*zip(data.labels.tolist(), data.numbers.tolist(), strict=True)}
    by_pair: dict[tuple[int, int], int] = {}
    for i in logits.argsort(descending=True).tolist():
        a, b = int(labels[i]), int(predicted[i])
        if a != b and (b, int(numbers[i])) not in known:
            by_pair.setdefault((min(a, b), max(a, b)), i)
    return [*by_pair.values()]


def _look_alikes(labels: Tensor, predicted: Tensor, of_class: Items) -> list[Query]:
    """Return the classes with the most confusions, each with the classes that it was taken for."""
    predictions: dict[int, Counter[int]] = defaultdict(Counter)
    for true, label in zip(labels.tolist(), predicted.tolist(), strict=True):
        predictions[true][label] += 1
    confused = {true: counts.total() - counts[true] for true, counts in predictions.items()}
    worst = sorted((true for true in predictions if confused[true]), key=lambda true: (-confused[true], true))
    queries = []
    for true in worst[:_SHOWN]:
        best = sorted(predictions[true].items(), key=lambda pair: (-pair[1], pair[0]))[:_TOP]
        total = predictions[true].total()
        candidates = [Candidate(of_class(label), count / total, label == true) for label, count in best]
        places = [label for label, _ in best]
        rank = places.index(true) + 1 if true in places else None
        queries.append(Query(of_class(true), candidates, rank))
    return queries


def pair_similarities(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return x_i . x_j of pairs of neighbors in one class, and of random pairs of different classes.

    >>> x = torch.eye(4)[[0, 0, 1, 2]]
    >>> pair_similarities(x, torch.tensor([5, 5, 3, 4]))[0]
    tensor([1.])
    """
    order = labels.argsort(stable=True)
    a, b = order[:-1], order[1:]
    same = labels[a] == labels[b]
    a, b = a[same][:_MOST_PAIRS], b[same][:_MOST_PAIRS]
    i, j = (torch.randperm(len(labels), generator=seeded(side))[:_ROWS_OF_PAIRS] for side in ("rows", "columns"))
    others = labels[i, None] != labels[j]
    return (embeddings[a] * embeddings[b]).sum(1), (embeddings[i] @ embeddings[j].T)[others]
