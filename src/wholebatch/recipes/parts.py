"""Scores, masks and row losses that several recipes share.

`relative` is the logit minus that of the row's partner. Its log-sum-exp is the cross-entropy of the partner,

    log sum_j exp(scale s_ij) - scale s_ii = log sum_j exp(scale (s_ij - s_ii))

without the difference of two large numbers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own(x: Any, y: Any) -> Tensor:  # fields of rows and of columns
    """Return where a column is the row's partner."""
    found: Tensor = x.index == y.index
    return found


def other(x: Any, y: Any) -> Tensor:  # fields
    """Return where a column is another row."""
    found: Tensor = x.index != y.index
    return found


def scaled(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    """Return the logit scale s."""
    logit: Tensor = p.scale * s
    return logit


def relative(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    """Return the logit minus that of the row's partner."""
    logit: Tensor = p.scale * (s - x.partner)
    return logit


def only_all(r: Any, x: Any, p: Any) -> Tensor:  # fields
    """Return the term `all` as the loss of a row."""
    loss: Tensor = r.all
    return loss
