"""Scores, masks and row losses that several recipes share.

`relative` is the logit minus that of the row's partner. With its log-sum-exp N_i over the other candidates, the
cross-entropy of the partner is

    log sum_j exp(scale s_ij) - scale s_ii = log(1 + exp N_i)

without the difference of two large numbers, and a loss near 0 keeps its digits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..nodes.cross_entropy import softplus


def scaled(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    """Return the logit scale s."""
    logit: Tensor = p.scale * s
    return logit


def relative(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    """Return the logit minus that of the row's partner."""
    logit: Tensor = p.scale * (s - x.partner)
    return logit


def against_negatives(r: Any, x: Any, p: Any) -> Tensor:  # fields
    """Return log(1 + exp N) of the term `negatives`."""
    return softplus(r.negatives)
