"""InfoNCE: each query's key against the keys, negatives, and other queries of the global batch.

    S_ij = scale q_i . k_j,    T_i = S_ii,    A_i = logsumexp over its negatives
    L    = 1/B sum_i softplus(A_i - T_i) = 1/B sum_i [ log(exp T_i + exp A_i) - T_i ]

The caller chooses the negatives: directions, exclusions, hard negatives of single queries. Each choice gives logsumexps
A from one sweep or several (see `_directions`), which are combined here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.precision import paired_products
from ..contract import Checks, Facts, KernelOptions, Options, Reduction, agree, entry, reduce_losses
from ..logsumexp import softplus
from ..nodes import RowStatistics, statistics_fields
from ..nodes.cross_entropy import many_positives, mean_logit, one_positive
from ._declaration import Declaration, Sweep
from ._directions import Ceiling, Direction, Retrieval
from ._hard_negatives import combined, hard_negative_statistics
from ._info_nce_inputs import InfoNCETensors
from ._info_nce_options import InfoNCESettings, PartitionOf, as_tuple
from ._logit_scale import TakesLogitScale
from ._module import KernelLoss
from ._pairs import EqualIdsAre
from .statistics import report_statistics

_WITH_PAIRS = (
    ("query_to_key",),
    ("key_to_query",),
    ("query_to_key", "key_to_query"),
)  # each sum is that of a pair, too


@entry
def info_nce_loss(
    queries: Tensor,
    keys: Tensor,
    *,
    logit_scale: Tensor | float,
    negatives: Tensor | None = None,
    hard_negatives: Tensor | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    negative_ids: Tensor | None = None,
    hard_negative_ids: Tensor | None = None,
    equal_ids: EqualIdsAre = "excluded",
    directions: Sequence[Direction] = ("query_to_key",),
    partition: PartitionOf = "joint",
    margin: float = 0.0,
    hardness: float = 0.0,
    hard_negative_hardness: float | None = None,
    exclude_above: float | None = None,
    exclude_relative: bool = False,
    exclude_directions: Sequence[Direction] | None = None,
    query_guides: Tensor | None = None,
    key_guides: Tensor | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the cross-entropy of each query's key among the keys and negatives of all ranks, with its exact gradient.

    S = logit_scale * Q [K; N]^T,    L = CE(S, i),    Q, K, N: all ranks' rows.

    With further directions and T_i = S_ii, A^d_i the logsumexp over the negatives of direction d (for queries i, j;
    keys and negatives j of all ranks)

        query_to_key     S(q_i, k_j), j != i        key_to_query   S(q_j, k_i), j != i
        query_to_query   S(q_i, q_j), j != i        key_to_key     S(k_i, k_j), j != i

    `partition="joint"` has one softmax over all directions, L_i = log(c exp T_i + sum_d exp A^d_i) - T_i, where c is
    the number of the first two directions that take part. "per_direction" has one softmax for each,
    L_i = mean_d [ log(exp T_i + exp A^d_i) - T_i ].

    Args:
        queries: Q_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        keys: K_r, (b_r, d) or more rows; row i is the positive of query i, rows from b_r on are negatives (in the
            concatenated batch they come after the positives of all ranks).
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        negatives: N_r, (n_r, d), further keys that are no query's positive, such as mined hard negatives; they count
            for the queries of all ranks. On all ranks or on none; n_r may differ and may be 0.
        hard_negatives: (b_r, h, d), h negatives of each query, which count for that query alone.
        query_ids: (b_r,) integers other than -2^63; a key or another query with a query's id is not a negative of it.
            Default: the ids of the queries' keys.
        key_ids: (rows of keys,). Default: the ids of the keys' queries.
        negative_ids: (n_r,). Default: no negative is excluded.
        hard_negative_ids: (b_r, h). Default: no hard negative is excluded.
        equal_ids: "excluded": keys with a query's id are left out. "positive": they are further positives, and L_i is
            the mean over all positives of query i, which are all in the softmax; for the first two directions only.
        directions: which similarities take part; at least one of the first two.
        partition: "joint" or "per_direction".
        margin: subtracted from the positive's similarity, in the denominator as well, as in CosFace.
        hardness: a, >= 0: negatives of query_to_key have the logit (logit_scale + a) q . k, with the gradient of
            logit_scale q . k, so that harder ones weigh more.
        hard_negative_hardness: the same number for `hard_negatives`, >= 0. Default: that of the other negatives.
        exclude_above: m: negatives that are more similar than the positive by more than m count as false negatives and
            are left out, without gradient: S_ij > logit_scale (q_i . k_i + m), in each direction. Rounding decides
            ties: with m = 0 and keys that occur twice, pass ids.
        exclude_relative: the bound is q_i . k_i + m |q_i . k_i|.
        exclude_directions: the directions in which `exclude_above` holds. Default: all. Qwen3-Embedding's loss has
            directions ("query_to_key", "query_to_query", "key_to_key"), and 0.1 as the margin in the first two.
        query_guides: (b_r, g), features of another model, whose similarities then decide about `exclude_above`.
        key_guides: (rows of keys, and of negatives below them, g). The similarities of guides are dot products:
            normalize them. `hard_negatives` have no guides, so with guides none of them is left out.
        label_smoothing: weight of the uniform distribution over all candidates, from 0 to 1.
        weights: (b_r,), one for each example, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": this rank's L_i, (b_r,); see
            :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`. The smaller tower travels: the queries, or the keys
            and negatives.

    Returns:
        L, the same on every rank: `wholebatch.reference.info_nce_loss` of the whole batch, at least in float32.

    Collectives: for each sweep those of :func:`wholebatch.functional.clip_loss`, with the traveling tower as Y; with
    ids two all-gathers of them. Work: 4 units of b K d multiply-adds per rank for K keys and negatives in all; 3 where
    exp(S) is kept. key_to_query adds nothing, except with `hardness` or `exclude_above`, where each further direction
    adds 4 units. query_to_query adds 2 b B d, key_to_key 2 or 4. Memory: that of
    :func:`wholebatch.functional.clip_loss` for each sweep, and with `negatives` a copy of this rank's keys and
    negatives below one another.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for fewer keys than queries, keys or negatives with another number of features, and negatives on some
            ranks only; ids of the wrong length or type; options that do not exist or cannot be combined.
        RuntimeError: if the gradient is differentiated again.

    Source: van den Oord et al., 2018, arXiv:1807.03748, equation 4; with in-batch negatives, Karpukhin et al., 2020,
    arXiv:2004.04906, equation 2; all directions in one softmax, Li et al., 2023, arXiv:2308.03281; false negatives by
    margin, Zhang et al., 2025, arXiv:2506.05176, by a guide, Solatorio, 2024, arXiv:2402.16829; hardness, Lan et al.,
    2025, arXiv:2503.04812.

    >>> import torch, wholebatch as wb
    >>> q, n = torch.eye(3), -torch.eye(3)
    >>> wb.functional.info_nce_loss(q, q, logit_scale=10.0, negatives=n)
    tensor(0.0002)
    """
    settings = InfoNCESettings(
        equal_ids=equal_ids,
        directions=as_tuple(directions),
        partition=partition,
        margin=margin,
        hardness=hardness,
        hard_negative_hardness=hard_negative_hardness,
        exclude_above=exclude_above,
        exclude_relative=exclude_relative,
        exclude_directions=None if exclude_directions is None else as_tuple(exclude_directions),
        label_smoothing=label_smoothing,
    )
    tensors = InfoNCETensors(
        queries=queries,
        keys=keys,
        negatives=negatives,
        hard_negatives=hard_negatives,
        query_ids=query_ids,
        key_ids=key_ids,
        negative_ids=negative_ids,
        hard_negative_ids=hard_negative_ids,
        query_guides=query_guides,
        key_guides=key_guides,
        weights=weights,
    )

    harder = isinstance(hardness, int | float) and hardness != 0  # others are refused by `check`
    are_names = all(isinstance(name, str) for name in settings.directions)  # others are refused by `check`
    reads_scale = exclude_above is not None or harder or hard_negatives is not None

    def check() -> dict[str, Any]:
        settings.check()
        return {"guides": tensors.check(settings), "settings": repr(settings)}

    facts = agree(
        "info_nce_loss",
        Options(reduction=reduction, **options),
        tensors.inputs(logit_scale, any_scale=are_names and settings.directions in _WITH_PAIRS),
        Checks(
            check,
            tensors.read_back,
            tensors.check_values if tensors.has_values else None,
            must_match=("settings", "guides"),
            settings=(*vars(settings).values(),) if tensors.is_simple else None,
            reads="exclude_above, hardness and hard_negatives need the scale" * reads_scale,
        ),
    )
    scale = facts.scalars["logit_scale"]
    if (exclude_above is not None or hardness or hard_negative_hardness) and scale <= 0:
        raise ValueError(
            f"info_nce_loss: logit_scale must be positive for exclude_above and hardness, got {scale}; pass "
            "1 / temperature"
        )
    ceiling = _ceiling(facts, tensors, settings)
    facts = facts.widened() if len(settings.directions) > 1 or hard_negatives is not None else facts
    row_fields = statistics_fields(mean_logit=label_smoothing > 0, statistics=facts.statistics)
    retrieval = Retrieval(facts, equal_ids, row_fields)
    plain = settings.are_plain and not (facts.statistics or retrieval.several or hard_negatives is not None)
    if plain and (losses := retrieval.pair_losses()) is not None:
        return reduce_losses(facts, losses, facts.rows["queries"].total)
    sides = retrieval.statistics(settings.directions, hardness=hardness, ceiling=ceiling, limited=settings.limited)
    if hard_negatives is not None:
        excluded = None
        if hard_negative_ids is not None:
            excluded = hard_negative_ids.to(facts.device) == retrieval.local_query_ids[:, None]
        below = ceiling if "query_to_key" in settings.limited else None
        hardness_of_hard = hardness if hard_negative_hardness is None else hard_negative_hardness
        hard_statistics = hard_negative_statistics(facts, hard_negatives.shape, hardness_of_hard, below, excluded)
        sides["query_to_key"] = combined(sides["query_to_key"], hard_statistics)
    target = sides[settings.main].target
    assert target is not None
    if retrieval.several:
        losses = _many_positives(settings, retrieval, sides)
        target = target / retrieval.positives(settings.main)
    else:
        losses = _one_positive(settings, sides, target - facts.inputs["logit_scale"] * margin if margin else target)
    if facts.statistics:
        report_statistics(facts.comm, facts.factor_of("logit_scale"), [(sides[settings.main], target)])
    return reduce_losses(facts, losses, facts.rows["queries"].total)


class InfoNCELoss(TakesLogitScale, KernelLoss):
    """InfoNCE over the global batch: the settings of :func:`wholebatch.functional.info_nce_loss`.

    Args:
        logit_scale: default for calls that leave it out, as in :class:`wholebatch.CLIPLoss`.
        settings: all other keyword arguments of :func:`wholebatch.functional.info_nce_loss` that are no tensors.
    """

    equal_ids: EqualIdsAre = "excluded"
    directions: Sequence[Direction] = ("query_to_key",)
    partition: PartitionOf = "joint"
    margin: float = 0.0
    hardness: float = 0.0
    hard_negative_hardness: float | None = None
    exclude_above: float | None = None
    exclude_relative: bool = False
    exclude_directions: Sequence[Direction] | None = None
    label_smoothing: float = 0.0

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        super().check()
        names = [field.name for field in fields(InfoNCESettings)]
        settings = {name: value for name, value in self.settings.items() if name in names}
        settings["directions"] = as_tuple(self.directions)
        if self.exclude_directions is not None:
            settings["exclude_directions"] = as_tuple(self.exclude_directions)
        InfoNCESettings(**settings).check()

    @entry
    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        *,
        logit_scale: Tensor | float | None = None,
        negatives: Tensor | None = None,
        hard_negatives: Tensor | None = None,
        query_ids: Tensor | None = None,
        key_ids: Tensor | None = None,
        negative_ids: Tensor | None = None,
        hard_negative_ids: Tensor | None = None,
        query_guides: Tensor | None = None,
        key_guides: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.info_nce_loss`: (b_r, d), (b_r, d), a scalar, (n_r, d) -> L."""
        return info_nce_loss(
            queries,
            keys,
            negatives=negatives,
            hard_negatives=hard_negatives,
            query_ids=query_ids,
            key_ids=key_ids,
            negative_ids=negative_ids,
            hard_negative_ids=hard_negative_ids,
            query_guides=query_guides,
            key_guides=key_guides,
            weights=weights,
            **self._settings_of_call(logit_scale=logit_scale),
        )


def _many_positives(
    settings: InfoNCESettings, retrieval: Retrieval, sides: Mapping[Direction, RowStatistics]
) -> Tensor:
    """Return L_i, (b,): the mean over directions of the mean cross-entropy of a query's positives."""
    losses = [
        many_positives(side, retrieval.positives(direction), label_smoothing=settings.label_smoothing)
        for direction, side in sides.items()
    ]
    return torch.stack(losses).mean(0)


def _one_positive(settings: InfoNCESettings, sides: Mapping[Direction, RowStatistics], target: Tensor) -> Tensor:
    """Return L_i, (b,), of queries with one positive each, whose logit is T_i."""
    statistics, smoothing = list(sides.values()), settings.label_smoothing
    if settings.partition == "per_direction":
        return torch.stack([one_positive(side, target, label_smoothing=smoothing) for side in statistics]).mean(0)
    copies = sum(name in ("query_to_key", "key_to_query") for name in sides)
    lowest = torch.finfo(target.dtype).min / 4  # instead of -inf without negatives, whose gradient would be NaN
    logsumexp = torch.stack([side.logsumexp.clamp(min=lowest) for side in statistics]).logsumexp(0)
    loss = softplus(logsumexp - target - math.log(copies)) + math.log(copies)
    return loss if not smoothing else loss + smoothing * (target - mean_logit(statistics, target, copies))


def _ceiling(facts: Facts, tensors: InfoNCETensors, settings: InfoNCESettings) -> Ceiling | None:
    """Return the similarities above which a negative counts as false; None without `exclude_above`."""
    above, b = settings.exclude_above, len(tensors.queries)
    if above is None:
        return None
    query_guides, key_guides = tensors.query_guides, tensors.key_guides
    if query_guides is None or key_guides is None:
        pair_similarities = paired_products(facts.inputs["queries"], facts.inputs["keys"][:b])
    else:
        query_guides, key_guides = (guide.detach().to(facts.dtype) for guide in (query_guides, key_guides))
        pair_similarities = paired_products(query_guides, key_guides[:b])
    largest = pair_similarities + above * (pair_similarities.abs() if settings.exclude_relative else 1)
    return Ceiling(largest, query_guides, key_guides)


DECLARATION = Declaration(info_nce_loss, InfoNCELoss, Sweep())
