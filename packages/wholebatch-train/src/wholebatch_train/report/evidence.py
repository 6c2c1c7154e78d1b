"""The evidence of a search and of a classifier: examples, the worst mistakes, and similarities of pairs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from wholebatch.app.tensors import are_right, first_ranks

from ..data.classes import LabeledImages
from ..data.pairs import Stated
from ..data.randomness import seeded
from .page import Candidate, Evidence, Gallery, Item, Query

_SHOWN, _TOP = 12, 5
_ROWS_OF_NEGATIVES = 448  # of each side: 200,000 pairs

Items = Callable[[int], Item]
_MOST_PAIRS, _ROWS_OF_PAIRS = 100_000, 448


def search_evidence(
    first: tuple[str, Tensor, Items],
    second: tuple[str, Tensor, Items],
    stated: Stated,
    *,
    both_ways: bool = True,
    device: torch.device | str = "cpu",
) -> Evidence:
    """Return the evidence of a search among the items of two sides.

    Args:
        first: the queries: their name in the plural, unit features (n, d) on the CPU, and the item of a place.
        second: the same of the candidates, (m, d): the items of `stated`, and behind them others that are right for no
            query. These only are candidates: they do not ask, if `both_ways`.
        stated: which of them belong together.
        both_ways: search with the candidates for the queries, too.
        device: where the similarities of all pairs are computed.
    """
    galleries = _galleries(first, second, stated.right, device)
    (_, x, _), (name, y, second_item) = first, second
    if both_ways:
        galleries += _galleries((name, y[: len(stated.rows[1])], second_item), first, stated.back, device)
    negatives, number = negative_similarities(x, y, stated.right)
    i, j = stated.right
    note = (
        f"Cosines of {len(i):,} pairs that belong together, and of {number} pairs that do not; each set is scaled to "
        "its own number."
    )
    return Evidence(galleries, (x[i] * y[j]).sum(1), negatives, note)


def shown_rows(count: int) -> list[int]:
    """Return a random dozen of rows, the same for each call."""
    return torch.randperm(count, generator=seeded("shown"))[:_SHOWN].tolist()


def search(
    queries: Tensor, candidates: Tensor, right: Tensor, rows: Sequence[int], query_item: Items, candidate_item: Items
) -> list[Query]:
    similarity = queries[[*rows]] @ candidates.T
    best = similarity.topk(min(_TOP, len(candidates)), dim=1).indices.tolist()
    mask = are_right(right, torch.tensor(rows), len(candidates))
    first = similarity.masked_fill(~mask, float("-inf")).max(1, keepdim=True)
    ranks = (1 + ((similarity >= first.values) & ~mask).sum(1)).tolist()  # ties count against the query
    answers = first.indices[:, 0].tolist()

    def candidate(line: int, place: int) -> Candidate:
        return Candidate(candidate_item(place), similarity[line, place].item(), bool(mask[line, place]))

    return [
        Query(
            query_item(row),
            [candidate(line, other) for other in best[line]],
            ranks[line],
            None if mask[line, best[line]].any() else candidate(line, answers[line]),
        )
        for line, row in enumerate(rows)
    ]


def _galleries(
    queries: tuple[str, Tensor, Items], candidates: tuple[str, Tensor, Items], right: Tensor, device: torch.device | str
) -> list[Gallery]:
    """Return a sheet of random queries, and one of those whose right answer has the lowest rank."""
    (name, x, query_item), (among, y, candidate_item) = queries, candidates
    rows = shown_rows(len(x))
    sample = search(x, y, right, rows, query_item, candidate_item)
    best = len(sample[0].candidates)
    first, hits = (sum(query.rank is not None and query.rank <= most for query in sample) for most in (1, best))
    sheet = Gallery(
        f"{name.capitalize()} → {among}",
        f"{len(rows)} of {len(x):,} held-out {name}, drawn at random, each with the {best} most similar of "
        f"{len(y):,} {among}. "
        f"A right one comes first for {first}, and is among them for {hits}.",
        sample,
    )
    ranks = first_ranks(x, y, right, device=device)
    missed = int((ranks >= best).sum())
    worst = ranks.argsort(descending=True, stable=True)[: min(_SHOWN, missed)].tolist()
    if not worst:
        return [sheet]
    note = f"The held-out {name} whose best right answer has the lowest rank among {len(y):,} {among}."
    mistakes = Gallery(
        f"Worst mistakes, {name} → {among}", note, search(x, y, right, worst, query_item, candidate_item)
    )
    return [sheet, mistakes]


def negative_similarities(x: Tensor, y: Tensor, right: Tensor) -> tuple[Tensor, str]:
    """Return x_i . y_j of pairs that are not `right`, of random rows if there are many, and their number in words.

    >>> negative_similarities(torch.eye(2), torch.eye(2), torch.tensor([[0, 1], [0, 1]]))
    (tensor([0., 0.]), 'all 2')
    """
    i, j = (
        torch.randperm(len(z), generator=seeded(side))[:_ROWS_OF_NEGATIVES] for side, z in (("rows", x), ("columns", y))
    )
    wrong = ~torch.isin(i[:, None] * len(y) + j, right[0] * len(y) + right[1])
    cosines = (x[i] @ y[j].T)[wrong]
    is_all = max(len(x), len(y)) <= _ROWS_OF_NEGATIVES
    return cosines, f"all {len(cosines):,}" if is_all else f"{len(cosines):,} random"


def classes_evidence(
    embeddings: Tensor,
    labels: Tensor,
    top: Tensor,
    similarities: Tensor,
    surest: Sequence[int],
    example_item: Items,
    class_item: Items,
) -> Evidence:
    """Return the evidence of a classifier from its test examples, unit rows (n, d) of classes `labels`, (n,).

    `top`, (n, k), are the best classes of each, with their `similarities`; `surest` are examples with a wrong class.
    """

    def query(row: int) -> Query:
        best, true = top[row].tolist(), int(labels[row])
        candidates = [
            Candidate(class_item(label), similarity, label == true)
            for label, similarity in zip(best, similarities[row].tolist(), strict=True)
        ]
        missed = None if true in best else Candidate(class_item(true), None, True)
        return Query(example_item(row), candidates, None if missed else best.index(true) + 1, missed)

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
    alike = _look_alikes(labels, top[:, 0], class_item)
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
    """Return the test images with a wrong class, which has no equal image: the surest first, each pair once."""
    labels, numbers = data.labels[data.test], data.numbers[data.test]
    known = {*zip(data.labels.tolist(), data.numbers.tolist(), strict=True)}
    by_pair: dict[tuple[int, int], int] = {}
    for i in logits.argsort(descending=True).tolist():
        a, b = int(labels[i]), int(predicted[i])
        if a != b and (b, int(numbers[i])) not in known:
            by_pair.setdefault((min(a, b), max(a, b)), i)
    return [*by_pair.values()]


def _look_alikes(labels: Tensor, predicted: Tensor, class_item: Items) -> list[Query]:
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
        candidates = [Candidate(class_item(label), count / total, label == true) for label, count in best]
        places = [label for label, _ in best]
        rank = places.index(true) + 1 if true in places else None
        queries.append(Query(class_item(true), candidates, rank))
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
