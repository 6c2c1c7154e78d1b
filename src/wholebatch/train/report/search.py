"""The evidence of a search: queries with their best candidates, the worst mistakes, and similarities of pairs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..data.randomness import seeded
from ..tasks.retrieval import ranks_of_partner
from .content import Candidate, Evidence, Gallery, Item, Query

_SHOWN, _TOP = 12, 5
_ROWS_OF_NEGATIVES = 448  # of each side: 200,000 pairs

Items = Callable[[int], Item]


def search_evidence(
    first: tuple[str, Tensor, Items], second: tuple[str, Tensor, Items], *, both_ways: bool = True
) -> Evidence:
    """Return the evidence of a search among n rows, where row i of one side belongs to row i of the other.

    Args:
        first: the queries: their name in the plural, unit features (n, d) on the CPU, and the item of a row.
        second: the same of the candidates.
        both_ways: search with the candidates for the queries, too.
    """
    galleries = []
    for queries, candidates in ((first, second), (second, first)) if both_ways else ((first, second),):
        galleries += _galleries(queries, candidates)
    (_, x, _), (_, y, _) = first, second
    negatives, number = negative_similarities(x, y)
    note = (
        f"Cosines of {len(x):,} pairs that belong together, and of {number} pairs that do not; each set is scaled to "
        "its own number."
    )
    return Evidence(galleries, (x * y).sum(1), negatives, note)


def shown_rows(count: int) -> list[int]:
    """Return a random dozen of rows, the same for each call."""
    return torch.randperm(count, generator=seeded("shown"))[:_SHOWN].tolist()


def search(
    queries: Tensor, candidates: Tensor, rows: Sequence[int], of_query: Items, of_candidate: Items
) -> list[Query]:
    """Return these rows of the queries, each with its best candidates."""
    similarity = queries[[*rows]] @ candidates.T
    best = similarity.topk(min(_TOP, len(candidates)), dim=1).indices.tolist()
    partner = similarity.gather(1, torch.tensor(rows)[:, None])
    ranks = ((similarity >= partner).sum(1)).tolist()  # as ranks_of_partner: ties count against the query

    def candidate(line: int, row: int) -> Candidate:
        return Candidate(of_candidate(row), similarity[line, row].item(), row == rows[line])

    return [
        Query(
            of_query(row),
            [candidate(line, other) for other in best[line]],
            ranks[line],
            None if row in best[line] else candidate(line, row),
        )
        for line, row in enumerate(rows)
    ]


def _galleries(queries: tuple[str, Tensor, Items], candidates: tuple[str, Tensor, Items]) -> list[Gallery]:
    """Return a sheet of random queries, and one of those whose right answer has the lowest rank."""
    (of, x, of_query), (among, y, of_candidate) = queries, candidates
    rows = shown_rows(len(x))
    found = search(x, y, rows, of_query, of_candidate)
    best = len(found[0].candidates)
    first, hits = (sum(query.rank is not None and query.rank <= most for query in found) for most in (1, best))
    sheet = Gallery(
        f"{of.capitalize()} → {among}",
        f"{len(rows)} of {len(x):,} held-out {of}, drawn at random, each with the {best} most similar of "
        f"{len(y):,} {among}. "
        f"The right one comes first for {first}, and is among them for {hits}.",
        found,
    )
    ranks = ranks_of_partner(x, y)
    missed = int((ranks >= best).sum())
    worst = ranks.argsort(descending=True, stable=True)[: min(_SHOWN, missed)].tolist()
    if not worst:
        return [sheet]
    note = f"The held-out {of} whose right answer has the lowest rank among {len(y):,}."
    mistakes = Gallery(f"Worst mistakes, {of} → {among}", note, search(x, y, worst, of_query, of_candidate))
    return [sheet, mistakes]


def negative_similarities(x: Tensor, y: Tensor) -> tuple[Tensor, str]:
    """Return x_i . y_j for j != i, of random rows if there are many, and the number of pairs in words.

    >>> negative_similarities(torch.eye(2), torch.eye(2))
    (tensor([0., 0.]), 'all 2')
    """
    i, j = (torch.randperm(len(x), generator=seeded(side))[:_ROWS_OF_NEGATIVES] for side in ("rows", "columns"))
    different = i[:, None] != j
    found = (x[i] @ y[j].T)[different]
    return found, f"all {len(found):,}" if len(x) <= _ROWS_OF_NEGATIVES else f"{len(found):,} random"
