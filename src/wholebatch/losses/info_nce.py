"""InfoNCE: each query's own key against keys, negatives, and other queries of the global batch.

    S_ij = scale q_i . k_j,    T_i = S_ii,    A_i = logsumexp over its negatives
    L    = 1/B sum_i softplus(A_i - T_i) = 1/B sum_i [ log(exp T_i + exp A_i) - T_i ]

Which similarities of all ranks are negatives is the caller's choice: directions, exclusions, hard negatives of a
query's own. All of them are numbers A of one sweep or several (see `_directions`), put together here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .._checks import (
    check_alike,
    check_choice,
    check_features,
    check_flag,
    check_label_smoothing,
    check_number,
    largest_norm,
)
from ..comm import Group
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..sweep import Memory
from ..sync import Sync
from ._cross_entropy import many_positives, mean_logit, one_positive, softplus
from ._directions import DIRECTIONS, NO_ID, Ceiling, Direction, Retrieval
from ._door import Agreement, LossModule, Options, Reduction, agree, eager
from ._own_negatives import as_rows, check_own_negatives, own_negatives, together
from ._pairs import EQUAL_IDS, EqualIdsAre
from ._softmax import Numbers, wanted
from ._towers import paired_products
from .statistics import batch_statistics

PartitionOf = Literal["joint", "per_direction"]
PARTITIONS = ("joint", "per_direction")


@eager
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
    exclude_above: float | None = None,
    exclude_relative: bool = False,
    query_guides: Tensor | None = None,
    key_guides: Tensor | None = None,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    return_statistics: bool = False,
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
) -> Any:
    r"""Cross-entropy of each query's own key among the keys and negatives of all ranks, with its exact gradient.

    S = logit_scale * Q [K; N]^T,    L = CE(S, i),    Q, K, N: all ranks' rows.

    With further directions and T_i = S_ii, A^d_i the logsumexp over the negatives of direction d (for queries i, j;
    keys and negatives j of all ranks)

        query_to_key     S(q_i, k_j), j != i        key_to_query   S(q_j, k_i), j != i
        query_to_query   S(q_i, q_j), j != i        key_to_key     S(k_i, k_j), j != i

    `partition="joint"` has one softmax for all, L_i = log(c exp T_i + sum_d exp A^d_i) - T_i, where the pair itself
    counts once for each of the first two directions that take part, c in all. "per_direction" has one softmax for
    each, L_i = mean_d [ log(exp T_i + exp A^d_i) - T_i ].

    Args:
        queries: Q_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16 (the last two are widened to float32).
        keys: K_r, (b_r, d) or more rows; row i is the positive of query i, rows from b_r on are negatives (in the
            concatenated batch they lie behind the positives of all ranks).
        logit_scale: multiplies the similarities (1 / temperature); a number or a tensor of shape () or [1], the same
            on all ranks.
        negatives: N_r, (n_r, d), further keys that are nobody's positive, such as mined hard negatives; they count for
            the queries of all ranks. On all ranks or on none; n_r may differ and may be 0.
        hard_negatives: (b_r, h, d), each query's own, which count for it alone.
        query_ids: (b_r,) integers, any but -2^63; a key with a query's id is no negative of it, nor is another query
            with that id. Default: those of the queries' keys.
        key_ids: of the keys, (rows of keys,). Default: those of their queries.
        negative_ids: of the negatives, (n_r,). Default: none of them is excluded.
        hard_negative_ids: of the hard negatives, (b_r, h). Default: none of them is excluded.
        equal_ids: "excluded": such keys are left out. "positive": they are further positives, L_i is the mean over
            all of query i's, with the positives of each direction in its sum; for the first two directions.
        directions: which similarities take part, one of the first two among them.
        partition: "joint" or "per_direction".
        margin: subtracted from the positive's similarity (in its own softmax, too, as in CosFace).
        hardness: a, >= 0: negatives of query_to_key have the logit (logit_scale + a) q . k, with the gradient of
            logit_scale q . k: harder ones weigh more.
        exclude_above: m: negatives more similar than the positive by more than m are taken for false, and left out:
            S_ij > logit_scale (q_i . k_i + m), in each direction. What is left out has no gradient. Ties are decided
            by rounding: for m = 0 and keys that occur twice, give ids.
        exclude_relative: the bound is q_i . k_i + m |q_i . k_i|.
        query_guides: (b_r, g), features of another model, whose similarities then decide what is left out.
        key_guides: (rows of keys, and of negatives below them, g). Guides' similarities are dot products: normalize
            them. A query's own hard negatives have no guide, and stay.
        label_smoothing: weight of the uniform distribution over all candidates.
        weights: (b_r,), of the examples, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": this rank's L_i, (b_r,); see
            :func:`wholebatch.functional.clip_loss`.
        return_statistics: return (L, :class:`wholebatch.BatchStatistics`), of the direction query_to_key, or of
            key_to_query where that does not take part.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.
        sync: "mean", "sum" or None, as there.
        exchange: "gather", "ring" or "auto", as there; what travels is the queries, or keys and negatives, whichever
            are fewer.
        memory: "flat", "auto" or bytes, as there.
        kernel: as in :func:`wholebatch.functional.clip_loss`.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.info_nce_loss` on the concatenated
        batch. Its dtype is that of the features, float32 for half precision.

    The gradient is that of this one L, with the meaning of `sync` as in :func:`wholebatch.functional.clip_loss`.
    `backward` is called on every rank, with the same incoming gradient and in the same order as that of other losses;
    ranks that differ all raise ValueError.

    Work: 4 units of b K d multiply-adds per rank, K all keys and negatives; 3 where exp(S) is kept. key_to_query adds
    nothing to that, unless there is `hardness` or `exclude_above`; then each direction is another 4 units.
    query_to_query is another 2 b B d, key_to_key 2 or 4. Memory and collectives: as
    :func:`wholebatch.functional.clip_loss` for each sweep, with the traveling tower in the place of Y, and with
    `negatives` a copy of this rank's keys and negatives below one another; with ids two all-gathers of them.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also fewer keys than queries, keys or negatives of another width, and negatives on some ranks only; ids of
            the wrong length or type; options that do not exist or do not go together.
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
    settings = _Settings(
        equal_ids=equal_ids,
        directions=_as_tuple(directions),
        partition=partition,
        margin=margin,
        hardness=hardness,
        exclude_above=exclude_above,
        exclude_relative=exclude_relative,
        label_smoothing=label_smoothing,
    )
    several_ids = query_ids is not None or key_ids is not None

    def check() -> dict[str, Any]:
        settings.check()
        settings.check_positives(equal_ids == "positive" and several_ids, hard_negatives)
        _check_rows(queries, keys)
        if hard_negatives is not None:
            if "query_to_key" not in settings.directions:
                raise ValueError("hard_negatives are those of query_to_key: give that direction, too")
            check_own_negatives(queries, hard_negatives, hard_negative_ids)
        _check_compared(
            several_ids,
            {"negative_ids": negative_ids, "hard_negative_ids": hard_negative_ids},
            {"negatives": negatives, "hard_negatives": hard_negatives},
        )
        check_flag("return_statistics", return_statistics)
        guides = _check_guides(queries, keys, negatives, query_guides, key_guides, exclude_above)
        return {"settings": repr(settings), "guides": guides, "statistics": return_statistics}

    given_ids = {"query_ids": query_ids, "key_ids": key_ids, "negative_ids": negative_ids}

    def see() -> dict[str, Tensor]:
        return {name: (ids.to(torch.int64) == NO_ID).any() for name, ids in given_ids.items() if ids is not None}

    def judge(seen: Mapping[str, float]) -> dict[str, Any]:
        for name in given_ids:
            if seen.get(name):
                raise ValueError(f"{name} must not have the id -2^63, which stands for none; give it another number")
        return {}

    agreed = agree(
        "info_nce_loss",
        Options(group, sync, exchange, memory, reduction, kernel),
        scalars={"logit_scale": logit_scale},
        features={"queries": queries, "keys": keys, "negatives": negatives, "hard_negatives": as_rows(hard_negatives)},
        matching=("queries", "keys"),
        optional=("negatives", "hard_negatives"),
        ids={
            "query_ids": (query_ids, "queries"),
            "key_ids": (key_ids, "keys"),
            "negative_ids": (negative_ids, "negatives"),
        },
        weights=(weights, "queries"),
        check=check,
        see=see,
        judge=judge,
        must_match=("settings", "guides", "statistics"),
    )
    b, scale = len(queries), agreed.scalars["logit_scale"]
    if (exclude_above is not None or hardness) and scale <= 0:
        raise ValueError(f"info_nce_loss: exclude_above and hardness need a positive logit_scale, got {scale}")
    ceiling = None
    if exclude_above is not None:
        ceiling = _ceiling(agreed, b, exclude_above, exclude_relative, query_guides, key_guides)
    agreed = agreed.widened() if len(settings.directions) > 1 or hard_negatives is not None else agreed
    retrieval = Retrieval(agreed, equal_ids, wanted(mean_logit=label_smoothing > 0, statistics=return_statistics))
    found = retrieval.numbers(settings.directions, hardness=hardness, ceiling=ceiling)
    target = found[settings.main].target
    assert target is not None
    if hard_negatives is not None:
        excluded = None
        if hard_negative_ids is not None:
            excluded = hard_negative_ids.to(agreed.device) == retrieval.local_query_ids[:, None]
        of_own = own_negatives(agreed, hard_negatives.shape, hardness, ceiling, excluded)
        found["query_to_key"] = together(found["query_to_key"], of_own)
    if retrieval.several:
        losses = torch.stack(
            [
                many_positives(side, retrieval.positives(direction), label_smoothing=label_smoothing)
                for direction, side in found.items()
            ]
        ).mean(0)
        target = target / retrieval.positives(settings.main)
    else:
        losses = settings.cross_entropy(found, target - agreed.inputs["logit_scale"] * margin if margin else target)
    loss = agreed.reduce(losses, agreed.rows["queries"].total)
    if not return_statistics:
        return loss
    return loss, batch_statistics(agreed.comm, scale, [(found[settings.main], target)])


class InfoNCELoss(LossModule):
    """Each query against all keys and negatives: the settings of :func:`wholebatch.functional.info_nce_loss`.

    A module without parameters; `logit_scale` enters `forward`, so that it can stay inside the model that the
    engine wraps.

    Args:
        settings: all keyword arguments of :func:`wholebatch.functional.info_nce_loss` that are neither tensors nor
            `logit_scale`.
    """

    def __init__(
        self,
        *,
        equal_ids: EqualIdsAre = "excluded",
        directions: Sequence[Direction] = ("query_to_key",),
        partition: PartitionOf = "joint",
        margin: float = 0.0,
        hardness: float = 0.0,
        exclude_above: float | None = None,
        exclude_relative: bool = False,
        label_smoothing: float = 0.0,
        reduction: Reduction = "mean",
        return_statistics: bool = False,
        group: Group = None,
        sync: Sync = "mean",
        exchange: ExchangeName = "auto",
        memory: Memory = "auto",
        kernel: Kernel = "auto",
    ) -> None:
        settings: dict[str, Any] = {
            "equal_ids": equal_ids,
            "directions": _as_tuple(directions),
            "partition": partition,
            "margin": margin,
            "hardness": hardness,
            "exclude_above": exclude_above,
            "exclude_relative": exclude_relative,
            "label_smoothing": label_smoothing,
        }
        _Settings(**settings).check()
        super().__init__(
            group=group,
            sync=sync,
            exchange=exchange,
            memory=memory,
            kernel=kernel,
            reduction=reduction,
            return_statistics=return_statistics,
            **settings,
        )

    @eager
    def forward(
        self,
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
        query_guides: Tensor | None = None,
        key_guides: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Any:
        """See :func:`wholebatch.functional.info_nce_loss`: (b_r, d), (b_r, d), a scalar, (n_r, d) -> L."""
        return info_nce_loss(
            queries,
            keys,
            logit_scale=logit_scale,
            negatives=negatives,
            hard_negatives=hard_negatives,
            query_ids=query_ids,
            key_ids=key_ids,
            negative_ids=negative_ids,
            hard_negative_ids=hard_negative_ids,
            query_guides=query_guides,
            key_guides=key_guides,
            weights=weights,
            **self.settings,
        )


@dataclass(frozen=True)
class _Settings:
    """Options that are no tensors."""

    equal_ids: str
    directions: tuple[Direction, ...]
    partition: str
    margin: float
    hardness: float
    exclude_above: float | None
    exclude_relative: bool
    label_smoothing: float

    @property
    def main(self) -> Direction:
        """The direction whose positives are looked at."""
        return "query_to_key" if "query_to_key" in self.directions else "key_to_query"

    def check(self) -> None:
        """Raise ValueError unless each of them exists, and they go together."""
        check_choice("equal_ids", self.equal_ids, EQUAL_IDS)
        check_choice("partition", self.partition, PARTITIONS)
        for direction in self.directions:
            check_choice("directions", direction, DIRECTIONS)
        if not {"query_to_key", "key_to_query"} & set(self.directions):
            raise ValueError(f"directions must have 'query_to_key' or 'key_to_query' among them, got {self.directions}")
        if len(set(self.directions)) < len(self.directions):
            raise ValueError(f"directions must be different, got {self.directions}")
        check_label_smoothing(self.label_smoothing)
        check_flag("exclude_relative", self.exclude_relative)
        check_number("margin", self.margin)
        if check_number("hardness", self.hardness) < 0:
            raise ValueError(f"hardness must not be negative, got {self.hardness}; 0 is none")
        if self.hardness and "query_to_key" not in self.directions:
            raise ValueError("hardness is that of query_to_key: give that direction, too")
        if self.exclude_above is not None:
            check_number("exclude_above", self.exclude_above)
        elif self.exclude_relative:
            raise ValueError("exclude_relative says how exclude_above is meant: give that, too")

    def check_positives(self, several: bool, hard_negatives: Tensor | None) -> None:
        """Several positives to a query: what does not go with them."""
        given = {
            "margin": self.margin,
            "hardness": self.hardness,
            "exclude_above": self.exclude_above is not None,
            "hard_negatives": hard_negatives is not None,
            "directions": not set(self.directions) <= {"query_to_key", "key_to_query"},
            "partition='joint'": self.partition == "joint" and len(self.directions) > 1,
        }
        wrong = [name for name, value in given.items() if value]
        if several and wrong:
            raise ValueError(
                f"equal_ids='positive' does not go with {', '.join(wrong)}; it takes the directions query_to_key and "
                "key_to_query, per direction"
            )

    def cross_entropy(self, found: dict[Direction, Numbers], target: Tensor) -> Tensor:
        """L_i of one positive each, whose logit is T_i, (b,)."""
        sides, smoothing = list(found.values()), self.label_smoothing
        if self.partition == "per_direction":
            return torch.stack([one_positive(side, target, label_smoothing=smoothing) for side in sides]).mean(0)
        copies = sum(name in ("query_to_key", "key_to_query") for name in found)
        least = torch.finfo(target.dtype).min / 4  # of nothing: without the NaN that -inf's gradient would be
        together = torch.stack([side.logsumexp.clamp(min=least) for side in sides]).logsumexp(0)
        loss = softplus(together - target - math.log(copies)) + math.log(copies)
        return loss if not smoothing else loss + smoothing * (target - mean_logit(sides, target, copies))


def _as_tuple(directions: Any) -> tuple[Direction, ...]:
    """Of a lone name a tuple of it, which is what was meant; anything else is refused by the check."""
    return tuple(directions) if isinstance(directions, list | tuple) else (directions,)


def _ceiling(
    agreed: Agreement, b: int, above: float, relative: bool, query_guides: Tensor | None, key_guides: Tensor | None
) -> Ceiling:
    """Where a similarity begins to be too large for a negative."""
    if query_guides is None or key_guides is None:
        of_pairs = paired_products(agreed.inputs["queries"], agreed.inputs["keys"][:b])
    else:
        query_guides, key_guides = (guide.detach().to(agreed.dtype) for guide in (query_guides, key_guides))
        of_pairs = paired_products(query_guides, key_guides[:b])
    return Ceiling(of_pairs + above * (of_pairs.abs() if relative else 1), query_guides, key_guides)


def _check_rows(queries: Tensor, keys: Tensor) -> None:
    if len(keys) < len(queries):
        raise ValueError(
            f"keys must have at least as many rows as queries, got {len(keys)} and {len(queries)}; key i is the "
            "positive of query i"
        )


def _check_compared(given: bool, ids: dict[str, Tensor | None], rows: dict[str, Tensor | None]) -> None:
    """Ids of negatives have something to be compared with, and negatives to belong to."""
    for (name, of_ids), (of, of_rows) in zip(ids.items(), rows.items(), strict=True):
        if of_ids is not None and (not given or of_rows is None):
            raise ValueError(f"{name} are compared with query_ids or key_ids, and belong to {of}: give these, too")


def _check_guides(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor | None,
    query_guides: Tensor | None,
    key_guides: Tensor | None,
    exclude_above: float | None,
) -> list[Any] | None:
    """What ranks have to agree on about the guides."""
    if query_guides is None and key_guides is None:
        return None
    if query_guides is None or key_guides is None or exclude_above is None:
        raise ValueError(
            "query_guides, key_guides and exclude_above go together: give all three, or none of the guides"
        )
    rows = {"query_guides": len(queries), "key_guides": len(keys) + (0 if negatives is None else len(negatives))}
    for name, guides in (("query_guides", query_guides), ("key_guides", key_guides)):
        check_features(name, guides)
        if len(guides) != rows[name]:
            below = " (keys, and negatives below them)" if name == "key_guides" else ""
            raise ValueError(f"{name} must have {rows[name]} rows{below}, got {len(guides)}")
        largest_norm(name, guides)
    check_alike("query_guides", query_guides, "key_guides", key_guides, rows=False)
    return [query_guides.shape[1], str(query_guides.dtype)]
