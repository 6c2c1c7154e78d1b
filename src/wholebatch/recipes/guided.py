"""False negatives, found by a guide: another model, frozen, whose similarities g decide what is a negative.

    j is no negative of i  if  g_ij > g_ii - margin             "absolute"
                               g_ij > g_ii - margin |g_ii|      "relative"

The rest is InfoNCE. With other queries and other keys as negatives as well: :class:`wholebatch.InfoNCELoss` with
`query_guides` and `directions`.

Source: Solatorio, 2024, arXiv:2402.16829; the two margins are those of sentence-transformers' GISTEmbedLoss.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from torch import Tensor

from .._base.checks import check_choice
from .._base.settings import check_flag, check_number
from ..pair_loss import PairLoss
from ..terms import LogSumExp, other
from .parts import against_negatives
from .retrieval import Scale

MarginStrategy = Literal["absolute", "relative"]


def guided_info_nce(
    *,
    margin: float = 0.0,
    strategy: MarginStrategy = "absolute",
    mined: bool = False,
    scale: Scale = 100.0,
    **options: Any,  # of PairLoss
) -> PairLoss:
    """Return InfoNCE without the negatives that a guide finds more similar than the pair itself.

    Args:
        margin: a larger one leaves out more, a negative one less.
        strategy: whether the margin is subtracted from the pair's similarity, or this part of it is.
        mined: whether each query has mined negatives of its own, `candidates={"features": ..., "guide": ...}`.
        scale: as for :func:`wholebatch.recipes.same_task_info_nce`.
        **options: likewise.

    Returns:
        A loss of ({"features": queries, "guide": guides of queries}, {"features": keys, "guide": guides of keys}), by
        cosine similarities. Guides get no gradient.

    Raises:
        ValueError: for a margin that is no finite number, and for another strategy.

    >>> import torch, wholebatch as wb
    >>> rows, guide = torch.eye(3), torch.ones(3, 2)
    >>> x = {"features": rows, "guide": guide}
    >>> wb.recipes.guided_info_nce(margin=0.1, scale=1.0)(x, x)  # all rows are alike to the guide
    tensor(0.)
    """
    check_choice("strategy", strategy, ("absolute", "relative"))
    where = partial(_negative, margin=check_number("margin", margin), relative=strategy == "relative")
    return PairLoss(
        {"negatives": LogSumExp(_score, where=where, over="both" if check_flag("mined", mined) else "batch")},
        against_negatives,
        similarity={"features": "cosine", "guide": "cosine"},
        parameters={"scale": scale},
        **options,
    )


def _score(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarities and fields
    logit: Tensor = p.scale * (s.features - x.partner.features)
    return logit


def _negative(x: Any, y: Any, s: Any, *, margin: float, relative: bool) -> Tensor:  # fields and similarities
    pair = x.partner.guide
    negative: Tensor = s.guide <= pair - margin * (pair.abs() if relative else 1)
    return negative & other(x, y)
