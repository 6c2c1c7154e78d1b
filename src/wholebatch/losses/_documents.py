"""The documents of queries: which belong to which query, and which of them is its positive.

The documents of a rank are in the order of its queries: first those of query 0, then those of query 1, and at the end
documents that belong to no query. A query's first document is its positive; the others are its hard negatives.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

from .._base.checks import INTEGERS, is_dense
from .._base.settings import shown
from ..contract import Inputs
from ..tokens import Packed, Tokens, packed

NOBODY = -1  # the query of a document that belongs to none


def packed_texts(queries: Tokens, documents: Tokens) -> tuple[Packed, Packed]:
    """Return the tokens of queries and of documents without padding.

    Raises:
        ValueError: as `packed`, with the names of the arguments.
    """
    return (
        packed("queries", queries, names=("query_mask", "query_offsets")),
        packed("documents", documents, names=("document_mask", "document_offsets")),
    )


def inputs_of_texts(queries: Packed, documents: Packed, **others: Any) -> Inputs:
    """Return the inputs of a call: tokens, and how many items they belong to, which every rank has, and others."""
    return Inputs(
        features={"queries": queries.vectors, "documents": documents.vectors},
        items={"queries": len(queries.lengths), "documents": len(documents.lengths)},
        **others,
    )


class Owners(NamedTuple):
    """The owners of one rank's documents."""

    queries: list[int]  # for each document its query on this rank, or `NOBODY`
    positives: list[int]  # for each query its positive document on this rank

    @classmethod
    def of(cls, queries: int, documents: int, per_query: object) -> Owners:
        """Return the owners of so many documents, on this rank, of queries.

        The number of documents of each query is one for all, (queries,) integers, or None for 1.

        Raises:
            ValueError: for numbers that are none, below 1, or larger together than there are documents.
        """
        counts = _counts(queries, per_query)
        total = sum(counts)
        if total > documents:
            if per_query is None:
                raise ValueError(
                    f"documents must not be fewer than queries, got {documents} for {queries} queries; document i is "
                    "the positive of query i"
                )
            raise ValueError(
                f"documents_per_query must not be more than there are documents, got {total} in all for {documents} "
                "documents; a query's first document is its positive"
            )
        query_of_document = [query for query, count in enumerate(counts) for _ in range(count)]
        return cls(query_of_document + [NOBODY] * (documents - total), [0, *accumulate(counts)][:queries])


def _counts(queries: int, per_query: object) -> list[int]:
    """Return the number of documents of each query."""
    if per_query is None:
        return [1] * queries
    if isinstance(per_query, int) and not isinstance(per_query, bool) and per_query >= 1:
        return [per_query] * queries
    counts, good = list[int](), False
    if is_dense(per_query) and per_query.shape == (queries,):
        good = per_query.dtype in INTEGERS
        counts = per_query.tolist() if good else []
    if not good or min(counts, default=1) < 1:
        got = shown(per_query)
        if is_dense(per_query):
            got = f"{tuple(per_query.shape)}, {per_query.dtype}" + (f", smallest {min(counts)}" if counts else "")
        raise ValueError(
            f"documents_per_query must be an int >= 1, or a tensor of {queries} integers >= 1, the documents of each "
            f"query, got {got}; of a list pass torch.tensor(documents_per_query)"
        )
    return counts
