r"""Margins that depend on the norm of the embedding, as a measure of the quality of an image.

    AdaFace       phi = cos(theta - m u) - (m u + m)      u in [-1, 1]: the norm of x, standardized
    MagFace       phi = cos(theta + m(a))                 a = |x|

Both take a long embedding for that of a good image.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..._base.angular_margin import FOLDS, Fold
from ..._base.checks import (
    check_choice,
    check_fraction,
    check_number,
    check_positive_number,
    check_sequence,
    check_weight,
    shown,
)
from .angular import angular
from .interface import Targets, check_targets

_ADAFACE_NORMS = (1e-3, 100.0)


@dataclass(frozen=True)
class MagFace:
    r"""MagFace, phi = cos(theta + m(a)): the margin grows with the norm a = |x|, which has a regularizer.

    m(a) = m_low + (m_high - m_low) (a - a_low) / (a_high - a_low),   a within [a_low, a_high]
    L    = mean CE + weight mean(1 / a + a / a_high^2)

    Args:
        s: multiplies all cosines.
        norms: a_low, a_high.
        margins: m_low, m_high.
        weight: of the regularizer, which is added to the loss.
        fold: as in :class:`CombinedMargin`.

    Source: Meng et al., 2021, arXiv:2103.06627, equations 5 and 6, and its code's constants.
    """

    s: float = 64.0
    norms: tuple[float, float] = (10.0, 110.0)
    margins: tuple[float, float] = (0.45, 0.8)
    weight: float = 35.0
    fold: Fold = "extend"

    def __post_init__(self) -> None:
        check_choice("fold", self.fold, FOLDS)
        check_positive_number("s", self.s, "it multiplies cosines")
        check_weight("weight", self.weight, "it weighs the regularizer; 0 leaves it out")
        for name, ends in (("norms", self.norms), ("margins", self.margins)):
            if len(check_sequence(name, ends, "two numbers, (low, high)")) != 2:
                raise ValueError(f"{name} must be two numbers, (low, high); got {shown(ends)}")
            for end in ends:
                check_number(name, end)
        if not (0 < self.norms[0] < self.norms[1] and 0 <= self.margins[0] <= self.margins[1]):
            raise ValueError(
                "norms and margins must be ranges (low, high) with 0 < low < high and 0 <= low <= high, got "
                f"norms={self.norms} and margins={self.margins}"
            )

    def __call__(self, targets: Targets) -> Tensor:
        check_targets(targets)
        (low, high), (least, most) = self.norms, self.margins
        norms = targets.norms.clamp(low, high)
        return angular(targets, 1.0, least + (most - least) * (norms - low) / (high - low), self.fold)

    def regularizer(self, targets: Targets) -> Tensor:
        """Return the regularizer of each row, (b_r, 1)."""
        norms = targets.norms.clamp(*self.norms)
        return self.weight * (1 / norms + norms / self.norms[1] ** 2)


class AdaFace(nn.Module):
    r"""AdaFace, phi = cos(theta - m u) - (m u + m): u, from the norm, stresses hard examples of good quality.

        u = clip(h (|x| - mean) / std, -1, 1)

    In training, mean and std are running averages over the norms of the global batches; rows without a label
    (ignore_index) do not enter them. |x| is clamped to [0.001, 100] and has no gradient. The angle is clamped to
    [0, pi].

    Args:
        s: multiplies all cosines.
        m: the margin.
        h: slope of u in the standardized norm.
        t_alpha: the share of the new batch in the running averages.

    Source: Kim et al., 2022, arXiv:2204.00964, equations 12 to 15.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, s: float = 64.0, m: float = 0.4, h: float = 0.333, t_alpha: float = 0.01) -> None:
        super().__init__()
        check_positive_number("s", s, "it multiplies cosines")
        check_weight("m", m, "0 is no margin")
        check_weight("h", h, "it multiplies the norms' deviation from their mean; 0 leaves norms out")
        check_fraction("t_alpha", t_alpha)
        self.s, self.m, self.h, self.t_alpha = s, m, h, t_alpha
        self.register_buffer("mean", torch.tensor(20.0, dtype=torch.float64))
        self.register_buffer("std", torch.tensor(100.0, dtype=torch.float64))

    def extra_repr(self) -> str:
        return f"s={self.s}, m={self.m}, h={self.h}, t_alpha={self.t_alpha}"

    @torch.no_grad()
    def observe_norms(self, norms: Tensor) -> None:
        """Update the running averages with the norms of all ranks' rows."""
        if self.training and len(norms) > 1:
            norms = norms.to(self.mean).clamp(*_ADAFACE_NORMS)
            self.mean.lerp_(norms.mean(), self.t_alpha)
            self.std.lerp_(norms.std(), self.t_alpha)

    def forward(self, targets: Targets) -> Tensor:
        check_targets(targets)
        norms = targets.norms.detach().to(self.mean).clamp(*_ADAFACE_NORMS)
        u = ((norms - self.mean) / (self.std + 1e-3) * self.h).clamp(-1, 1)
        return angular(targets, 1.0, -self.m * u, "clip") - (self.m * u + self.m)
