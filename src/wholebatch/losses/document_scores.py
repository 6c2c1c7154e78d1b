"""Scores of late interaction without a gradient: of all documents, or of the best ones only."""

from __future__ import annotations

from typing import NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_choice
from .._base.settings import check_integer
from ..contract import BatchOptions, Checks, Facts, Options, agree, entry, prepared
from ..exchange import ColumnData
from ..nodes import Route, Vectors, choose_token_route, items_of_ranks, token_driver
from ..partition import tiles
from ..sweep import Block
from ..tokens import Tokens
from ._documents import inputs_of_texts, packed_texts
from ._late_interaction_terms import TOKEN_REDUCTIONS, TokenReduction

_LAST = torch.iinfo(torch.int64).max  # the index of a place that no document has yet


class TopDocuments(NamedTuple):
    """The best documents of each query.

    Attributes:
        scores: (b_r, k), the largest first.
        documents: (b_r, k), their index among the documents of all ranks, rank 0's first; of equal scores the lowest
            comes first.
    """

    scores: Tensor
    documents: Tensor


@overload
def max_sim(
    queries: Tensor,
    documents: Tensor,
    *,
    k: None = None,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    token_reduction: TokenReduction = "sum",
    **options: Unpack[BatchOptions],
) -> Tensor: ...
@overload
def max_sim(
    queries: Tensor,
    documents: Tensor,
    *,
    k: int,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    token_reduction: TokenReduction = "sum",
    **options: Unpack[BatchOptions],
) -> TopDocuments: ...
@entry
@torch.no_grad()
def max_sim(
    queries: Tensor,
    documents: Tensor,
    *,
    k: int | None = None,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    token_reduction: TokenReduction = "sum",
    **options: Unpack[BatchOptions],
) -> Tensor | TopDocuments:
    """Return the late interaction of this rank's queries with the documents of all ranks, without a gradient.

    s_ij = sum_t max_u q_it . d_ju

    Args:
        queries: (b_r, t, d), or (n, d) with `query_offsets`, as in :func:`wholebatch.functional.max_sim_loss`. b_r may
            differ between ranks and may be 0.
        documents: (c_r, u, d), or (m, d) with `document_offsets`, likewise; they travel.
        k: return the k largest scores of each query and their documents, of fewer documents all; None: the scores
            of all, in the order of documents.
        query_mask: (b_r, t) booleans, True where there is a token. Default: everywhere.
        document_mask: (c_r, u), likewise.
        query_offsets: (b_r + 1,) integers, where each query's tokens start, as there.
        document_offsets: (c_r + 1,), likewise.
        token_reduction: "sum", or "mean": divided by the number of the query's tokens.
        **options: group, exchange, memory and precision, see :class:`wholebatch.options.ProductOptions`.

    Returns:
        (b_r, C) scores of the documents of all ranks, rank 0's first, or with `k` a :class:`TopDocuments`. Their
        dtype is that of the tokens, float32 for half precision.

    Collectives: 1 handshake, 2 all-gathers of lengths, and those of the exchange for documents. Memory beyond inputs
    and result: two tiles; on several ranks the documents of all ranks ("gather"), or two blocks of them ("ring").

    Raises:
        ValueError: on every rank, as in :func:`wholebatch.functional.max_sim_loss`; also for `k` below 1.

    Source: Khattab and Zaharia, 2020, arXiv:2004.12832, equation 3.

    >>> import torch, wholebatch as wb
    >>> texts = torch.eye(4).view(2, 2, 4)  # two texts of two tokens
    >>> wb.max_sim(texts, texts)
    tensor([[2., 0.],
            [0., 2.]])
    >>> wb.max_sim(texts, texts, k=1).documents
    tensor([[0],
            [1]])
    """
    texts = Tokens(queries, query_mask, query_offsets), Tokens(documents, document_mask, document_offsets)

    def check() -> dict[str, object]:
        check_choice("token_reduction", token_reduction, TOKEN_REDUCTIONS)
        if k is not None:
            check_integer("k", k, minimum=1, detail="documents of each query")
        return {}

    packed_queries, packed_documents = prepared("max_sim", options.get("group"), lambda: packed_texts(*texts))
    facts = agree(
        "max_sim",
        Options(sync=None, **options),
        inputs_of_texts(packed_queries, packed_documents),
        Checks(check, settings=(token_reduction, k)),
    )
    vectors = Vectors(
        items_of_ranks(facts, packed_queries.lengths, facts.rows["queries"]),
        items_of_ranks(facts, packed_documents.lengths, facts.rows["documents"]),
    )
    lengths = torch.tensor(packed_queries.lengths, dtype=facts.dtype, device=facts.device)[:, None]
    divisors = lengths if token_reduction == "mean" else torch.ones_like(lengths)
    columns = facts.rows["documents"].total if k is None else min(k, facts.rows["documents"].total)
    best = TopDocuments(
        torch.full((len(lengths), columns), float("-inf"), dtype=facts.dtype, device=facts.device),
        torch.full((len(lengths), columns), _LAST, device=facts.device),
    )
    _visit_all(facts, choose_token_route(facts, vectors), vectors, divisors, best, keep_all=k is None)
    return best.scores if k is None else best


def _visit_all(
    facts: Facts, route: Route, vectors: Vectors, divisors: Tensor, best: TopDocuments, *, keep_all: bool
) -> None:
    """Write all scores, or merge the best ones of each tile, in place."""
    x, y = (route.products.rounded(facts.inputs[name].detach()) for name in ("queries", "documents"))
    driver = token_driver(route, x, vectors, winners=False)

    def visit(block: Block, columns: ColumnData) -> None:
        for tile in tiles(block.rows, block.cols, driver.side):
            scores = driver.logits(tile, *driver.factors(tile, block)) / divisors[tile.rows]
            if keep_all:
                best.scores[tile.rows, tile.cols] = scores
                continue
            index = torch.arange(tile.cols.start, tile.cols.stop, device=scores.device).expand_as(scores)
            _merge_(best, tile.rows, scores, index)

    route.exchange.accumulate(route.exchange.fetch(y), visit)


def _merge_(best: TopDocuments, rows: slice, scores: Tensor, index: Tensor) -> None:
    """Keep the best of what was kept and a tile's scores: larger scores first, of equal ones the lower index."""
    documents = torch.cat([best.documents[rows], index], 1)
    order = documents.argsort(1)
    documents = documents.gather(1, order)
    scores = torch.cat([best.scores[rows], scores], 1).gather(1, order)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, : best.scores.shape[1]]
    best.scores[rows], best.documents[rows] = scores.gather(1, order), documents.gather(1, order)
