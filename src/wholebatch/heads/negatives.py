"""The negatives' half of the loss: sums over this rank's classes, brought together for each rank's own embeddings."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._normalize import UNIT, normalize_rows
from ..comm import Communicator
from ..contract import Facts
from ..kernels import in_triton
from ..nodes import Bounds, Layout, Operands, RowStatistics, Towers, row_statistics, statistics_fields
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from .logits import Logits
from .margins import HardNegatives


@dataclass(frozen=True)
class Shard:
    """The rows of S: this rank's part of all centers.

    Args:
        centers: (K_r K, d), of any length, sub-centers one below the other.
        norms: (K_r K, 1), theirs.
        longest: no norm is larger.
        partition: how many classes each rank has.
        best_of: K, sub-centers of a class.
        offsets: (K_r,), added to the logits of these classes, or None.
        largest_offset: no offset is larger, nor its negative.
    """

    centers: Tensor
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
    transform: HardNegatives | None,
) -> RowStatistics:
    """Return the statistics of all embeddings over this rank's classes, without an embedding's own classes.

    Args:
        facts: of the call.
        logits: what a logit is.
        shard: this rank's centers.
        embeddings: all ranks' (B, d), and their norms, (B, 1).
        target_rows: (B, k, K), the rows of an embedding's own classes.
        transform: of the logits of negatives, or None.
    """
    (x, lengths), s, best_of = embeddings, logits.margin.s, shard.best_of
    offsets = None if shard.offsets is None else shard.offsets.repeat_interleave(best_of)
    ceiling = None
    if logits.exclude_above is not None:
        ceiling = torch.full_like(shard.norms[:, 0], s * logits.exclude_above)
        if offsets is not None:
            ceiling += offsets.detach()
    bound = UNIT**2 if transform is None else UNIT**2 * (1 + abs(transform.t))
    if not logits.of_unit_embeddings:
        bound *= facts.norms["embeddings"]
    if not logits.of_unit_centers:
        bound *= shard.longest
    travel_norms = None
    if logits.of_unit_embeddings:
        if in_triton(facts.options.kernel):  # multiplied in the precision that they have
            travel_norms = lengths.detach()
        else:
            x = normalize_rows(x)
    stay_norms = shard.norms if logits.of_unit_centers else None
    rows = Partition(tuple(best_of * count for count in shard.partition.counts))
    _, numbers = row_statistics(
        facts,
        (s, s),
        Operands(
            [shard.centers, x],
            Towers(stays=(0,), travels=(1,), stay_norms=stay_norms, travel_norms=travel_norms),
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
    assert numbers is not None
    return numbers


def of_local_rows(
    comm: Communicator, rows: Partition, numbers: RowStatistics, of_targets: dict[str, Tensor]
) -> tuple[RowStatistics, dict[str, Tensor]]:
    """Return the statistics of this rank's rows over all classes, from those of all rows over each rank's classes.

    Args:
        comm: the ranks.
        rows: whose each is.
        numbers: of all rows over this rank's negatives.
        of_targets: each (B, k), 0 where the class is another rank's.

    Returns:
        The statistics and the targets of this rank's rows.

    Collective: 1 all-to-all of 2 B numbers, with label smoothing 4 B, and of B more for all but the first of
    `of_targets`; the same in backward.
    """
    of_negatives = [x for x in (numbers.logsumexp, numbers.logits, numbers.count) if x is not None]
    parts = [x[:, None] for x in of_negatives] + [x.to(of_negatives[0]) for x in of_targets.values()]
    mine, widths = rows.counts[comm.rank], [x.shape[1] for x in parts]
    found = comm.all_to_all(
        torch.cat(parts, dim=1), send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False
    )
    each = found.view(comm.size, mine, sum(widths)).split(widths, dim=2)
    logsumexp, *others = (x[..., 0] for x in each[: len(of_negatives)])
    none = logsumexp.isneginf().all(0)  # no negatives at all: the gradient of this is 0, and not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = {name: x.sum(0) for name, x in zip(of_targets, each[len(of_negatives) :], strict=True)}
    return RowStatistics(total, None, *(x.sum(0) for x in others)), summed
