"""The log-sum-exp of numbers that are never all in memory at once: a shift that is known in advance, and a sum.

    logsumexp(s) = shift + log(sum),        sum = sum_k exp(s_k - shift)        for any shift

Sums with one shift can be added, over tiles and over ranks. There are two choices of the shift.

**One shift for all rows and columns.** Then a tile needs one exponential per entry: the same number enters its row's
sum and its column's. By Cauchy-Schwarz |s| <= bound = |scale| max|x| max|y|, so with n terms in the longest sum

    shift = max(0, ceil(bound - top)),      top = log(largest float) - log(n) - 4

is the lowest shift under which no sum overflows and no sum's reciprocal becomes denormal: up to a bound of 75 in
float32 (n = 8192) it is 0. A whole number is subtracted from the large s without rounding. The remaining risk is
underflow, where all s of a row are far below the bound. Terms below the smallest normal float t lose at most t each, so

    sum >= n t / (eps / 2)      proves a relative error of at most eps / 2      (the underflow check)

The sums need no check where no term can be denormal and each term leaves room for the factors of its reciprocal,
exp(-bound - shift) >= t / (eps / 2): up to a bound of 70. Nor do they where each sum is known to have a large term: at
scale 100 it is enough that a pair's own cosine is above -0.3, which holds in training, and which is known before
anything is summed.

**The maximum of each row, and of each column**, where the underflow check fails (scale 10^4; features whose
similarities are all near -1). It is always exact; it costs a sweep for the maxima, and a second exponential per entry.

The gradient is the softmax, d logsumexp(s) / d s_k = exp(s_k - shift) / sum. It is computed in this form and not as
exp(s_k - logsumexp), because s_k - shift is almost exact, while logsumexp has been rounded at the magnitude of s (4e-6
at scale 100 in float32).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_LARGEST_BOUND = 1e6  # of one shift for all
_LARGE = 40.0  # above this, softplus(x) rounds to x in float64
_ROUNDING = 0.1  # of bounds, and of logits
_MARGIN = 4.0  # keeps 1 / sum normal, at least e^4 / (largest float), and covers the rounding of bounds


def log_sum_exp(shift: Tensor | float, sums: Tensor) -> Tensor:
    """Return shift + log(sum), (n,); -inf for a sum of no terms."""
    return shift + sums.log()


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)), exact to rounding."""
    return F.softplus(x, threshold=_LARGE)


def shared_shift(bound: float, terms: int, dtype: torch.dtype) -> float | None:
    """Return the lowest shift under which no sum of `terms` exponentials overflows; None if `bound` is too large.

    >>> shared_shift(14.3, 8192, torch.float32), shared_shift(100.0, 8192, torch.float32)
    (0.0, 25.0)
    """
    top = math.log(torch.finfo(dtype).max) - math.log(max(terms, 1)) - _MARGIN
    return float(max(0, math.ceil(bound - top))) if bound < _LARGEST_BOUND else None


def cannot_underflow(bound: float, shift: float, dtype: torch.dtype) -> bool:
    """Whether every single exponential is far above the denormal numbers.

    >>> cannot_underflow(70.0, 0.0, torch.float32), cannot_underflow(71.0, 0.0, torch.float32)
    (True, False)
    """
    return -bound - shift >= math.log(_smallest(1, dtype)) + _ROUNDING


def passes_underflow_check(min_logit: float, shift: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether every sum that has a logit of at least `min_logit` passes the underflow check.

    >>> [passes_underflow_check(logit, 25.0, 8192, torch.float32) for logit in (-25.0, -40.0)]
    [True, False]
    """
    return min_logit - shift >= math.log(_smallest(terms, dtype)) + _ROUNDING


def count_underflowed(sums: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Count the sums of up to `terms` exponentials in `dtype` that fail the underflow check, or are NaN. Shape ()."""
    return torch.count_nonzero(~(sums >= _smallest(terms, dtype)))


def _smallest(terms: int, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return max(terms, 1) * info.tiny / (info.eps / 2)
