"""The running (shift, sum) pair: log-sum-exp of numbers that are never all there at once.

    logsumexp(s) = shift + log(sum),        sum = sum_k exp(s_k - shift),     shift = max_k s_k

Two pairs over disjoint sets merge exactly:

    shift = max(shift_a, shift_b)
    sum   = sum_a exp(shift_a - shift) + sum_b exp(shift_b - shift)

So tiles of a row can be absorbed one after another, and partial columns of several ranks can be merged by
two small all-reduces (a maximum, then a sum). No exponent is ever positive: nothing overflows, whatever the
scale, and the largest term of every sum is exactly 1: nothing underflows to log(0).

The gradient is the softmax, d logsumexp(s) / d s_k = exp(s_k - shift) / sum. It is evaluated in this form and
not as exp(s_k - logsumexp), because s_k - shift is a difference of two neighbouring floats and all but exact,
while logsumexp itself has been rounded at the magnitude of s (4e-6 at scale 100 in float32).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class LogSumExp:
    """n running pairs, updated in place; the empty set is (-inf, 0)."""

    shift: Tensor
    sum: Tensor

    @classmethod
    def empty(cls, n: int, *, dtype: torch.dtype, device: torch.device) -> LogSumExp:
        """n pairs that have absorbed nothing yet."""
        return cls(
            torch.full((n,), float("-inf"), dtype=dtype, device=device),
            torch.zeros(n, dtype=dtype, device=device),
        )

    def absorb(self, tile: Tensor, *, dim: int, at: slice, scratch: Tensor) -> None:
        """Take in the entries of a finite tile along `dim`, for the pairs `at`; `scratch` is overwritten."""
        shift, total = self.shift[at], self.sum[at]
        new_shift = torch.maximum(shift, tile.amax(dim))
        torch.sub(tile, new_shift.unsqueeze(dim), out=scratch).exp_()
        total.mul_(shift.sub_(new_shift).exp_()).add_(scratch.sum(dim))
        shift.copy_(new_shift)

    def rescale_(self, new_shift: Tensor) -> None:
        """Express the same sums relative to another shift, at least as large as the present one.

        An empty pair (its sum is 0) takes any shift, -inf included.
        """
        factor = (self.shift - new_shift).exp_()
        self.sum.mul_(factor.masked_fill_(self.shift.isneginf(), 0.0))
        self.shift = new_shift

    def value(self, dtype: torch.dtype | None = None) -> Tensor:
        """Shift + log(sum), in `dtype` (default: as stored)."""
        shift = self.shift if dtype is None else self.shift.to(dtype)
        total = self.sum if dtype is None else self.sum.to(dtype)
        return shift + total.log()
