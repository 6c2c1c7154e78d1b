"""Late interaction: each query token takes its best match among a document's tokens, and the sum of these is softmaxed.

    s_ij = sum_t max_u q_it . d_ju,    S_ij = scale s_ij, or scale s_ij / n_i over query i's n_i tokens
    T_i  = S_ij of its positive,       A_i  = logsumexp_j S_ij over its negatives
    L    = 1/B sum_i softplus(A_i - T_i)

In the words of `wholebatch.PairLoss`, with the similarity "max_sim": a few terms over the documents of all ranks. What
the data of query i and document j say about the pair decides which term it enters. The tower with fewer tokens travels;
where this is the queries', documents are rows, and functions of a query and a document get their arguments exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from ..contract import Checks, KernelOptions, Options, Reduction, agree, entry, prepared, reduce_losses
from ..tokens import Packed, Tokens
from ._documents import Owners, packed_texts
from ._info_nce_options import as_tuple
from ._late_interaction_batch import LateInteractionBatch
from ._late_interaction_terms import DocumentDirection, LateInteractionSettings, Side, TokenReduction
from ._logit_scale import TakesLogitScale
from ._module import KernelLoss
from ._pairs import EqualIdsAre
from .statistics import report_statistics


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
    **options: Unpack[KernelOptions],
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
        **options: see :class:`wholebatch.options.KernelOptions`.
            The tower with fewer tokens travels, without padding; what is kept is which token has won; kernels
            compute maxima, their sums and gradients of tokens, plain PyTorch the rest.

    Returns:
        L, the same on every rank: `wholebatch.reference.max_sim_loss` of the whole batch, at least in float32.

    Of a document's tokens with equal products the first wins and has the gradient, as in `torch.max`; of copies of a
    token the first has it on any number of ranks, however their products are rounded.

    Collectives: forward 1 handshake, 2 all-gathers of lengths and up to 3 of numbers about the traveling queries or
    documents, those of the exchange for tokens, up to 3 all-reduces of numbers of columns and of the loss; backward as
    in :func:`wholebatch.functional.clip_loss`. Work: 2 units of (query tokens of all ranks) (document tokens of all
    ranks) d / W multiply-adds, 1 forward and 1 backward, where winners are found again; 1 for those that are kept.
    Memory beyond inputs and gradients: a few tiles, about 10 MB in float32 on a CPU; with padding also the tokens and
    their gradients without it; on several ranks that of the exchange. Kept: one integer for each query token and
    document, of 8 bits for documents of up to 256 tokens, and S; "auto" keeps them where they fit into one more tile.
    With "auto" an S that is small beside a tile is one matrix in float64, and takes a third of the operations.

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
    settings = LateInteractionSettings(
        share_hard_negatives, equal_ids, as_tuple(directions), token_reduction, label_smoothing
    )
    ids = {"query_ids": query_ids, "document_ids": document_ids}

    def prepare() -> tuple[Packed, Packed, Owners]:
        texts = Tokens(queries, query_mask, query_offsets), Tokens(documents, document_mask, document_offsets)
        packed_queries, packed_documents = packed_texts(*texts)
        owners = Owners.of(len(packed_queries.lengths), len(packed_documents.lengths), documents_per_query)
        return packed_queries, packed_documents, owners

    packed_queries, packed_documents, owners = prepared("max_sim_loss", options.get("group"), prepare)
    batch = LateInteractionBatch(packed_queries, packed_documents, owners, ids, settings)

    def check() -> dict[str, Any]:
        settings.check()
        return {"settings": repr(settings), "tokens": batch.tokens, "longest query": batch.longest_query}

    facts = agree(
        "max_sim_loss",
        Options(reduction=reduction, **options),
        batch.inputs(logit_scale, weights),
        Checks(
            check,
            batch.read_back,
            batch.check_values,
            must_match=("settings",),
            settings=None if batch.has_ids else (*vars(settings).values(), batch.longest_query),
            reads="the numbers of tokens of all items are",
        ),
    )
    sides = [Side.of(reduced) for reduced in batch.reduced(facts)]
    each = [side.losses(label_smoothing) for side in sides]
    losses = each[0] if len(each) == 1 else torch.stack(each).mean(0)
    if facts.statistics:
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
        LateInteractionSettings(
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
