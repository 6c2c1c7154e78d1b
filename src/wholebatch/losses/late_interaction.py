"""Late interaction: each query token takes its best match among a document's tokens, and the sum of these is softmaxed.

    s_ij = sum_t max_u q_it . d_ju,    S_ij = scale s_ij, or scale s_ij / n_i over query i's n_i tokens
    T_i  = S_ij of its positive,       A_i  = logsumexp_j S_ij over its negatives
    L    = 1/B sum_i softplus(A_i - T_i)

In the words of `wholebatch.PairLoss`, with the similarity "max_sim": a few terms over the documents of all ranks. What
the data of query i and document j say about the pair decides which term it enters. The tower with fewer tokens travels;
where this is the queries', documents are rows, and functions of a query and a document get their arguments exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._checks import check_choice, check_label_smoothing
from .._settings import check_flag, shown
from .._statistics_request import statistics_requested
from ..comm import Group
from ..contract import Checks, Facts, Inputs, Options, Reduction, agree, entry, prepared, reduce_losses
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..nodes import RowStatistics
from ..nodes.cross_entropy import many_positives, one_positive
from ..pair_loss import Count, LogSumExp, Max, Sum
from ..pair_loss.agreed import Tower, reductions
from ..pair_loss.reductions import Term
from ..pair_loss.similarity import MAX_SIM, MAX_SIM_OF_ROWS
from ..sweep import Memory, Precision
from ..sync import Sync
from ..tokens import Packed, Tokens
from ._directions import NO_ID, check_reserved_ids, reserved_ids
from ._documents import NOBODY, Owners, inputs_of_texts, packed_texts
from ._info_nce_options import as_tuple
from ._logit_scale import TakesLogitScale
from ._module import KernelLoss
from ._pairs import EQUAL_IDS, EqualIdsAre
from .statistics import report_statistics

DocumentDirection = Literal["query_to_document", "document_to_query"]
TokenReduction = Literal["sum", "mean"]
TOKEN_REDUCTIONS = ("sum", "mean")
DIRECTIONS = ("query_to_document", "document_to_query")
_SIDES = {"query_to_document": "queries", "document_to_query": "documents"}  # whose rows or columns are reduced
_IDS = ("query_ids", "document_ids")


@entry
def max_sim_loss(
    queries: Tensor,
    documents: Tensor,
    *,
    logit_scale: Tensor | float,
    query_mask: Tensor | None = None,
    document_mask: Tensor | None = None,
    query_offsets: Tensor | None = None,
    document_offsets: Tensor | None = None,
    documents_per_query: Tensor | int | None = None,
    share_hard_negatives: bool = True,
    query_ids: Tensor | None = None,
    document_ids: Tensor | None = None,
    equal_ids: EqualIdsAre = "excluded",
    directions: Sequence[DocumentDirection] = ("query_to_document",),
    token_reduction: TokenReduction = "sum",
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
    precision: Precision = "auto",
) -> Tensor:
    r"""Return the cross-entropy of each query's document among those of all ranks, by late interaction of their tokens.

    S_ij = logit_scale * sum_t max_u q_it . d_ju,    L = CE(S, i)

    over query i's tokens t and document j's tokens u; padding takes no part.

    Args:
        queries: (b_r, t, d), token embeddings of this rank's queries as they are: the caller normalizes. Or (n, d) with
            `query_offsets`, all tokens one after the other. b_r may differ between ranks and may be 0. float64,
            float32, bfloat16 or float16.
        documents: (c_r, u, d), or (m, d) with `document_offsets`; c_r >= b_r. Document i is the positive of query i,
            and documents from b_r on are further negatives of the queries of all ranks; see `documents_per_query`.
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        query_mask: (b_r, t) booleans, True where there is a token. Default: everywhere.
        document_mask: (c_r, u) booleans, likewise.
        query_offsets: (b_r + 1,) integers: query i has the tokens from query_offsets[i] up to query_offsets[i + 1].
        document_offsets: (c_r + 1,) integers, likewise.
        documents_per_query: (b_r,) integers or one for all queries, >= 1: documents are in the order of queries, and of
            a query's documents the first is its positive and the others its hard negatives. Default: 1.
        share_hard_negatives: whether they are negatives of the queries of all ranks, or of their query alone.
        query_ids: (b_r,) integers other than -2^63; another document with a query's id is not a negative of it.
            Default: the ids of the queries' positives.
        document_ids: (c_r,). Default: a positive has the id of its query, other documents have none.
        equal_ids: "excluded": documents with a query's id are left out. "positive": they are further positives, and L_i
            is the mean over all positives of query i, which are all in the softmax.
        directions: "query_to_document", "document_to_query" (a query's positive against the queries of all ranks), or
            both: L_i is their mean.
        token_reduction: "sum", or "mean": S_ij is divided by the number of query i's tokens.
        label_smoothing: weight of the uniform distribution over all candidates, from 0 to 1.
        weights: (b_r,), one for each query, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": this rank's L_i, (b_r,); see
            :func:`wholebatch.functional.clip_loss`.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: how tokens travel, as there. The tower with fewer tokens travels, without padding.
        memory: "flat", "auto" or bytes, as there; what is kept is which token has won.
        kernel: "auto", "torch" or "triton", as there; a kernel computes the maxima, plain PyTorch the rest.
        precision: of products, as there.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.max_sim_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    Of a document's tokens with equal products, as computed, the first wins and has the gradient, as in `torch.max`.
    Products of matrices may round copies of a token differently, so that another copy wins in another tile.

    This one L is differentiated, and `sync` means the same as in :func:`wholebatch.functional.clip_loss`. Every rank
    must call `backward`, with the same incoming gradient and in the same order among losses; if ranks differ, all raise
    ValueError.

    Collectives: forward 1 handshake, 2 all-gathers of lengths and up to 3 of numbers about the traveling queries or
    documents, those of the exchange for tokens, up to 3 all-reduces of numbers of columns and of the loss; backward as
    in :func:`wholebatch.functional.clip_loss`. Work: 2 units of (query tokens of all ranks) (document tokens of all
    ranks) d / W multiply-adds, 1 forward and 1 backward, where winners are found again; 1 for those that are kept.
    Memory beyond inputs and gradients: a few tiles, about 10 MB in float32 on a CPU; with padding also the tokens and
    their gradients without it; on several ranks that of the exchange. Kept: one integer for each query token and
    document, of 8 bits for documents of up to 256 tokens, and S; "auto" keeps them where they fit into one more tile.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: for shapes, dtypes or embedding sizes that do not
            fit together, a mask that is not boolean, an item without a token, offsets that do not ascend to the end,
            documents_per_query that are more than there are; else as in :func:`wholebatch.functional.info_nce_loss`.
        RuntimeError: if the gradient is differentiated again.

    Source: Khattab and Zaharia, 2020, arXiv:2004.12832, section 3.3; in-batch negatives, Santhanam et al., 2022,
    arXiv:2112.01488; documents that are pictures, Faysse et al., 2025, arXiv:2407.01449.

    >>> import torch, wholebatch as wb
    >>> texts = torch.eye(4).view(2, 2, 4)  # two texts of two tokens
    >>> wb.functional.max_sim_loss(texts, texts, logit_scale=10.0)
    tensor(2.0612e-09)
    """
    statistics, options = statistics_requested(), Options(group, sync, exchange, memory, reduction, kernel, precision)
    settings = _Settings(share_hard_negatives, equal_ids, as_tuple(directions), token_reduction, label_smoothing)
    ids = dict(zip(_IDS, (query_ids, document_ids), strict=True))

    def prepare() -> tuple[Packed, Packed, Owners]:
        texts = Tokens(queries, query_mask, query_offsets), Tokens(documents, document_mask, document_offsets)
        of_queries, of_documents = packed_texts(*texts)
        owners = Owners.of(len(of_queries.lengths), len(of_documents.lengths), documents_per_query)
        return of_queries, of_documents, owners

    of_queries, of_documents, owners = prepared("max_sim_loss", group, prepare)
    batch = _Batch(of_queries, of_documents, owners, ids, mean=token_reduction == "mean")

    def check() -> dict[str, Any]:
        settings.check()
        return {"settings": repr(settings), "statistics": statistics, "tokens": batch.tokens}

    facts = agree(
        "max_sim_loss",
        options,
        batch.inputs(logit_scale, weights),
        Checks(check, batch.read_back, batch.check_values, must_match=("settings", "statistics")),
    )
    terms = settings.terms(ids=batch.has_ids, statistics=statistics)
    sides = [_Side.of(reduced) for reduced in batch.reduced(facts.widened(), settings.directions, terms)]
    losses = torch.stack([side.losses(label_smoothing) for side in sides]).mean(0)
    if statistics:
        report_statistics(facts.comm, facts.scalars["logit_scale"], [(x.statistics, x.target) for x in sides])
    return reduce_losses(facts, losses, facts.rows["queries"].total)


class MaxSimLoss(TakesLogitScale, KernelLoss):
    """Late interaction over the global batch: the settings of :func:`wholebatch.functional.max_sim_loss`.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.
        settings: all other keyword arguments of :func:`wholebatch.functional.max_sim_loss` that are no tensors.
    """

    share_hard_negatives: bool = True
    equal_ids: EqualIdsAre = "excluded"
    directions: Sequence[DocumentDirection] = ("query_to_document",)
    token_reduction: TokenReduction = "sum"
    label_smoothing: float = 0.0

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        super().check()
        directions = as_tuple(self.directions)
        _Settings(
            self.share_hard_negatives, self.equal_ids, directions, self.token_reduction, self.label_smoothing
        ).check()

    @entry
    def forward(
        self,
        queries: Tensor,
        documents: Tensor,
        logit_scale: Tensor | float | None = None,
        *,
        query_mask: Tensor | None = None,
        document_mask: Tensor | None = None,
        query_offsets: Tensor | None = None,
        document_offsets: Tensor | None = None,
        documents_per_query: Tensor | int | None = None,
        query_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.max_sim_loss`: (b_r, t, d), (c_r, u, d), a scalar -> L."""
        return max_sim_loss(
            queries,
            documents,
            query_mask=query_mask,
            document_mask=document_mask,
            query_offsets=query_offsets,
            document_offsets=document_offsets,
            documents_per_query=documents_per_query,
            query_ids=query_ids,
            document_ids=document_ids,
            weights=weights,
            **self._settings_of_call(logit_scale=logit_scale),
        )


Of = Callable[[Any, Any], Tensor]  # a function of the data of a query and of a document


@dataclass(frozen=True)
class _Settings:
    """The settings of one call, as :func:`wholebatch.functional.max_sim_loss` describes them."""

    share_hard_negatives: bool
    equal_ids: str
    directions: tuple[str, ...]
    token_reduction: str
    label_smoothing: float

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        check_flag("share_hard_negatives", self.share_hard_negatives)
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        check_choice("token_reduction", self.token_reduction, TOKEN_REDUCTIONS)
        check_label_smoothing(self.label_smoothing)
        known = all(isinstance(of, str) and of in DIRECTIONS for of in self.directions)
        if not known or not self.directions or len(set(self.directions)) < len(self.directions):
            raise ValueError(f"directions must be one or both of {list(DIRECTIONS)}, got {shown(self.directions)}")

    def terms(self, *, ids: bool, statistics: bool) -> Callable[[bool], dict[str, Term]]:
        """Return a function that makes the terms, given whether documents are rows.

        Args:
            ids: whether queries and documents have ids.
            statistics: whether the statistics of the batch are asked for.
        """
        several = ids and self.equal_ids == "positive"

        def matched(q: Any, d: Any) -> Tensor:
            found: Tensor = d.positive & (d.query == q.index)
            return found | (d.id == q.id) & (q.id != NO_ID) if several else found

        def negative(q: Any, d: Any) -> Tensor:
            found = ~matched(q, d)
            if ids and not several:
                found = found & ((d.id != q.id) | (q.id == NO_ID))
            if not self.share_hard_negatives:
                found = found & (d.positive | (d.query == NOBODY) | (d.query == q.index))
            return found

        def candidate(q: Any, d: Any) -> Tensor:
            return matched(q, d) | negative(q, d) if several else negative(q, d)

        def made(documents_are_rows: bool) -> dict[str, Term]:
            def of(function: Of) -> Of:
                return (lambda x, y: function(y, x)) if documents_are_rows else function

            def score(s: Any, x: Any, y: Any, p: Any) -> Tensor:
                q = y if documents_are_rows else x
                found: Tensor = p.scale * s
                return found / q.tokens if self.token_reduction == "mean" else found

            def doubled(s: Any, x: Any, y: Any, p: Any) -> Tensor:
                return 2 * score(s, x, y, p)

            found: dict[str, Term] = {
                "logsumexp": LogSumExp(score, of(candidate)),
                "target": Sum(score, of(matched)),
            }
            if several:
                found["positives"] = Count(of(matched))
            if self.label_smoothing:
                found |= {"logits": Sum(score, of(candidate)), "count": Count(of(candidate))}
            if statistics:
                found |= {
                    "largest": Max(score, of(negative), ties="split"),
                    "negatives": LogSumExp(score, of(negative)),
                    "squares": LogSumExp(doubled, of(negative)),
                }
            return found

        return made


@dataclass(frozen=True)
class _Batch:
    """The tensors of one call on this rank."""

    queries: Packed
    documents: Packed
    owners: Owners
    ids: dict[str, Tensor | None]
    mean: bool  # over the tokens of a query

    @property
    def has_ids(self) -> bool:
        """Whether queries or documents have ids."""
        return any(x is not None for x in self.ids.values())

    @property
    def tokens(self) -> list[int]:
        """The number of tokens of queries, and of documents."""
        return [len(self.queries.vectors), len(self.documents.vectors)]

    def inputs(self, logit_scale: Tensor | float, weights: Tensor | None) -> Inputs:
        """Return the inputs that are validated across ranks."""
        return replace(
            inputs_of_texts(self.queries, self.documents),
            scalars={"logit_scale": logit_scale},
            ids={name: (self.ids[name], of) for name, of in zip(_IDS, ("queries", "documents"), strict=True)},
            weights=(weights, "queries"),
        )

    def read_back(self) -> dict[str, Tensor]:
        """Return the numbers on the device that the checks of values need."""
        return reserved_ids(self.ids)

    def check_values(self, found: Mapping[str, float]) -> dict[str, Any]:
        """Raise ValueError for a reserved id; return no facts."""
        check_reserved_ids(self.ids, found)
        return {}

    def reduced(
        self, facts: Facts, directions: Sequence[str], terms: Callable[[bool], dict[str, Term]]
    ) -> list[dict[str, Tensor]]:
        """Return the reductions of each direction, (b,) each by the names of terms."""
        of_queries, of_documents = (sum(of_ranks) for of_ranks in zip(*facts.of_ranks("tokens"), strict=True))
        documents_stay = of_queries < of_documents
        query_data, document_data = self._query_data(facts), self._document_data(facts)
        if self.has_ids:
            query_data["id"], document_data["id"] = self._ids(facts)
        towers = {
            "queries": Tower(facts.inputs["queries"], self.queries.lengths, query_data),
            "documents": Tower(facts.inputs["documents"], self.documents.lengths, document_data),
        }
        found = reductions(
            facts,
            MAX_SIM_OF_ROWS if documents_stay else MAX_SIM,
            terms(documents_stay),
            dict(sorted(towers.items(), reverse=not documents_stay)),
            {"scale": facts.inputs["logit_scale"]},
            [_SIDES[direction] for direction in directions],
        )
        positives = self.owners.positives.to(facts.device)
        of_positives = {name: x[positives] for name, x in found["documents"].items()}
        return [found["queries"] if name == "query_to_document" else of_positives for name in directions]

    def _query_data(self, facts: Facts) -> dict[str, Tensor]:
        if not self.mean:
            return {}
        return {"tokens": torch.tensor(self.queries.lengths, dtype=facts.dtype, device=facts.device)}

    def _document_data(self, facts: Facts) -> dict[str, Tensor]:
        first = facts.rows["queries"].offsets[facts.rank]
        query = torch.where(self.owners.queries == NOBODY, NOBODY, self.owners.queries + first).to(facts.device)
        return {"query": query, "positive": self.owners.is_positive.to(facts.device)}

    def _ids(self, facts: Facts) -> tuple[Tensor, Tensor]:
        """Return the ids of queries and of documents; NO_ID where there is none."""
        positives, device = self.owners.positives.to(facts.device), facts.device
        of_queries, of_documents = (None if x is None else x.to(device, torch.int64) for x in self.ids.values())
        if of_documents is None:
            assert of_queries is not None
            of_documents = torch.full((len(self.documents.lengths),), NO_ID, device=device)
            of_documents[positives] = of_queries
        return of_documents[positives] if of_queries is None else of_queries, of_documents


@dataclass(frozen=True)
class _Side:
    """One direction: statistics of each query's softmax, and the number of its positives, (b,) each; None: one."""

    statistics: RowStatistics
    positives: Tensor | None

    @classmethod
    def of(cls, reduced: Mapping[str, Tensor]) -> _Side:
        effective = None
        if "squares" in reduced:
            effective = torch.where(
                reduced["squares"].isneginf(), 0.0, (2 * reduced["negatives"] - reduced["squares"]).exp()
            )
        statistics = RowStatistics(
            reduced["logsumexp"],
            reduced["target"],
            reduced.get("logits"),
            reduced.get("count"),
            reduced.get("largest"),
            effective,
        )
        return cls(statistics, reduced.get("positives"))

    @property
    def target(self) -> Tensor:
        """The (mean) logit of each query's positives."""
        assert self.statistics.target is not None
        return self.statistics.target if self.positives is None else self.statistics.target / self.positives

    def losses(self, label_smoothing: float) -> Tensor:
        """Return the cross-entropy of each query, (b,)."""
        if self.positives is not None:
            return many_positives(self.statistics, self.positives, label_smoothing=label_smoothing)
        lowest = torch.finfo(self.target.dtype).min / 4  # instead of -inf without negatives
        side = replace(self.statistics, logsumexp=self.statistics.logsumexp.clamp(min=lowest))
        return one_positive(side, self.target, label_smoothing=label_smoothing)
