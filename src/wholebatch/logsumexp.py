"""Log-sum-exp of numbers that are never all there at once: a shift that is known beforehand, and a sum.

    logsumexp(s) = shift + log(sum),        sum = sum_k exp(s_k - shift)        for any shift

Sums of one shift simply add, over tiles and over ranks. Which shift?

**One shift for all rows and columns.** Then a tile needs one exponential per entry: the same number goes into its row's
sum and into its column's. By Cauchy-Schwarz |s| <= bound = |scale| max|x| max|y|, so with n terms in the longest sum

    shift = max(0, ceil(bound - top)),      top = log(largest float) - log(n) - 4

lets no sum overflow, nor its reciprocal become denormal, and lies as low as possible: up to a bound of 75 in float32
(n = 8192) it is 0. A whole number is subtracted from the large s without rounding. What may go wrong is underflow,
where all of a row's s are far below the bound. Terms below the smallest normal float t lose at most t each, so

    sum >= n t / (eps / 2)      proves a relative error of at most eps / 2      (the certificate)

It needs no looking at the sums where no term can be denormal, and each leaves room for what its reciprocal is
multiplied by, exp(-bound - shift) >= t / (eps / 2): up to a bound of 70. Nor where each sum is known to have a large
term: at scale 100 it is enough that a pair's own cosine is above -0.3, which training sees to, and which is known
before anything is summed.

**The largest of each row, and of each column**, where the certificate fails (scale 10^4; features all of whose
similarities are near -1). Always exact; costs a sweep for the maxima, and a second exponential per entry.

The gradient is the softmax, d logsumexp(s) / d s_k = exp(s_k - shift) / sum. It is evaluated in this form and
not as exp(s_k - logsumexp), because s_k - shift is all but exact, while logsumexp itself has been rounded at the
magnitude of s (4e-6 at scale 100 in float32).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HOPELESS = 1e6
_ROUNDING = 0.1  # of bounds, and of logits
_MARGIN = 4.0  # 1 / sum stays a normal number, e^4 / (largest float) at least; and bounds are rounded, too


def log_sum_exp(shift: Tensor | float, sums: Tensor) -> Tensor:
    """shift + log(sum), (n,); -inf for a sum of nothing."""
    return shift + sums.log()


def shared_shift(bound: float, terms: int, dtype: torch.dtype) -> float | None:
    """The lowest shift under which no sum of `terms` exponentials overflows; None if `bound` leaves no hope of one.

    >>> shared_shift(14.3, 8192, torch.float32), shared_shift(100.0, 8192, torch.float32)
    (0.0, 25.0)
    """
    top = math.log(torch.finfo(dtype).max) - math.log(max(terms, 1)) - _MARGIN
    return float(max(0, math.ceil(bound - top))) if bound < _HOPELESS else None


def never_small(bound: float, shift: float, dtype: torch.dtype) -> bool:
    """Whether every single exponential is far from those that are no normal numbers.

    >>> never_small(70.0, 0.0, torch.float32), never_small(71.0, 0.0, torch.float32)
    (True, False)
    """
    return -bound - shift >= math.log(_smallest(1, dtype)) + _ROUNDING


def suffices(logit: float, shift: float, terms: int, dtype: torch.dtype) -> bool:
    """Whether a sum is certified in which one logit is at least this.

    >>> suffices(-25.0, 25.0, 8192, torch.float32), suffices(-40.0, 25.0, 8192, torch.float32)
    (True, False)
    """
    return logit - shift >= math.log(_smallest(terms, dtype)) + _ROUNDING


def uncertified(sums: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """How many sums of up to `terms` exponentials in `dtype` may have lost more than rounding. Shape ()."""
    return torch.count_nonzero(~(sums >= _smallest(terms, dtype)))


def _smallest(terms: int, dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return max(terms, 1) * info.tiny / (info.eps / 2)
