"""Sums over the negatives of each embedding: over the local classes first, then over the classes of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.normalize import UNIT, normalize_rows
from ..comm import Communicator
from ..contract import Facts
from ..nodes import Bounds, Layout, Operands, RowStatistics, Towers, row_statistics, statistics_fields
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from .logits import Logits
from .margins.interface import NegativeTransform


@dataclass(frozen=True)
class Shard:
    """The rows of S: the local part of all centers.

    Args:
        centers: (K_r K, d), of any length, the sub-centers of a class in consecutive rows; or a matrix that contains
            these rows.
        index: (K_r K,), ascending, their places in `centers`; None: all rows.
        norms: (K_r K, 1), of the centers.
        longest: upper bound of the norms.
        partition: the number of classes of each rank.
        best_of: K, sub-centers of a class.
        offsets: (K_r,), added to the logits of these classes, or None.
        largest_offset: upper bound of the absolute value of an offset.
    """

    centers: Tensor
    index: Tensor | None
    norms: Tensor
    longest: float
    partition: Partition
    best_of: int
    offsets: Tensor | None
    largest_offset: float


def negatives(
    facts: Facts,
    logits: Logits,
    shard: Shard,
    embeddings: tuple[Tensor, Tensor],
    *,
    target_rows: Tensor,
    transform: NegativeTransform | None,
) -> RowStatistics:
    """Return the statistics of each embedding over the local classes that are not its target classes.

    Args:
        facts: of the call.
        logits: the settings of logits.
        shard: the local centers.
        embeddings: all ranks' (B, d), and their norms, (B, 1).
        target_rows: (B, k, K), the rows of an embedding's target classes.
        transform: of the logits of negatives, or None.
    """
    (x, lengths), s, best_of = embeddings, logits.margin.s, shard.best_of
    offsets = None if shard.offsets is None else shard.offsets.repeat_interleave(best_of)
    ceiling = None
    if logits.exclude_above is not None:
        ceiling = torch.full_like(shard.norms[:, 0], s * logits.exclude_above)
        if offsets is not None:
            ceiling += offsets.detach()
    bound = UNIT**2 if transform is None else transform.bound(s * UNIT**2) / s
    if not logits.unit_embeddings:
        bound *= facts.norms["embeddings"]
    if not logits.unit_centers:
        bound *= shard.longest
    travel_norms = None
    if logits.unit_embeddings:
        if facts.kernels:  # kernels multiply in the dtype of the features
            travel_norms = lengths.detach()
        else:
            x = normalize_rows(x)
    stay_norms = shard.norms if logits.unit_centers else None
    rows = Partition(tuple(best_of * count for count in shard.partition.counts))
    _, statistics = row_statistics(
        facts,
        (s, s),
        Operands(
            [shard.centers, x],
            Towers((0,), (1,), stay_norms=stay_norms, travel_norms=travel_norms, stay_rows=shard.index),
            Layout(rows, Partition((len(x),)), replicated=True),
        ),
        Selection(
            Pairs(excluded=NamedRows(target_rows.flatten(1))),
            ceiling=ceiling,
            transform=transform,
            offsets=offsets,
            best_of=best_of,
        ),
        Bounds(bound, offset=shard.largest_offset),
        cols=statistics_fields(target=False, mean_logit=logits.label_smoothing > 0),
    )
    assert statistics is not None
    return statistics


def combine_over_ranks(
    comm: Communicator, rows: Partition, statistics: RowStatistics, target_parts: dict[str, Tensor]
) -> tuple[RowStatistics, dict[str, Tensor]]:
    """Return the statistics of the local rows over all classes; each rank passes those of all rows over its classes.

    Args:
        comm: the ranks.
        rows: the owners of the rows.
        statistics: of all rows over the local negatives.
        target_parts: numbers of the target classes, each (B, k); 0 if the class is on another rank.

    Returns:
        The statistics and the target parts of the local rows.

    Collective: 1 all-to-all of 2 B numbers, 4 B with label smoothing, and B more for each of `target_parts` after
    the first; the same in backward.
    """
    of_negatives = [x for x in (statistics.logsumexp, statistics.logits, statistics.count) if x is not None]
    parts = [x[:, None] for x in of_negatives] + [x.to(of_negatives[0]) for x in target_parts.values()]
    num_local, widths = rows.counts[comm.rank], [x.shape[1] for x in parts]
    received = comm.all_to_all(
        torch.cat(parts, dim=1), send_counts=rows.counts, receive_counts=(num_local,) * comm.size, check=False
    )
    each = received.view(comm.size, num_local, sum(widths)).split(widths, dim=2)
    logsumexp, *others = (x[..., 0] for x in each[: len(of_negatives)])
    none = logsumexp.isneginf().all(0)  # without any negatives the gradient must be 0, not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = {name: x.sum(0) for name, x in zip(target_parts, each[len(of_negatives) :], strict=True)}
    return RowStatistics(total, None, *(x.sum(0) for x in others)), summed
