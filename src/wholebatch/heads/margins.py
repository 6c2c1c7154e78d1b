r"""Margins: functions of the angle to the target class's center, by which its logit must exceed the others.

    theta = angle of x and w_y,    logit s phi(theta) of the target class, s cos theta_j of the others

    ArcFace       phi = cos(theta + m)                    CosFace      phi = cos theta - m
    SphereFace    phi = cos(m theta)                      combined     phi = cos(m1 theta + m2) - m3
    AdaFace       phi = cos(theta - m u) - (m u + m)      u in [-1, 1]: the norm of x, standardized
    MagFace       phi = cos(theta + m(a))                 a = |x|

Their gradient is that of the same function, d phi / d theta = -m1 sin(m1 theta + m2). The derivative by the cosine, the
usual form, is m1 sin(m1 theta + m2) / sin theta, unbounded at 0 and pi; that by the angle (see `angles`) is bounded.

Beyond m1 theta + m2 = pi the cosine rises again, so that a larger angle would be rewarded. `fold` replaces it there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from .._checks import (
    check_choice,
    check_fraction,
    check_instance,
    check_number,
    check_positive_number,
    check_sequence,
    check_weight,
    shown,
)

Fold = Literal["extend", "linear", "clip", "none"]
FOLDS = ("extend", "linear", "clip", "none")
_ADAFACE_NORMS = (1e-3, 100.0)

__all__ = [  # the margins that the package ships, under its own name as well
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "MagFace",
    "NormFace",
    "SphereFace",
]


@dataclass(frozen=True)
class Targets:
    """The input of a margin, for the local rows.

    Args:
        angles: (b_r, k), between embeddings and their classes' centers, in [0, pi], float64; 0 without a label.
        norms: (b_r, 1), of the embeddings, float64.
    """

    angles: Tensor
    norms: Tensor


def _check_targets(targets: object) -> None:
    check_instance("targets", targets, Targets, "wholebatch.heads.Targets, the angles and norms of rows")


class Margin(Protocol):
    """The interface of a margin; users may write their own."""

    @property
    def s(self) -> float:
        """The scale of the logits."""
        ...

    def __call__(self, targets: Targets) -> Tensor:
        """Return phi, (b_r, k)."""
        ...


@dataclass(frozen=True)
class CombinedMargin:
    r"""The combined margin, phi = cos(m1 theta + m2) - m3.

    Args:
        s: multiplies all cosines.
        m1: multiplies the angle (SphereFace).
        m2: radians added to the angle (ArcFace).
        m3: subtracted from the cosine (CosFace).
        fold: the function beyond m1 theta + m2 = pi. "extend": (-1)^k cos - 2k, as in SphereFace, which continues to
            fall, smoothly; "linear": cos theta - m2 sin(m2), as in ArcFace's published code, for m1 = 1 only; "clip":
            -1, without a gradient; "none": the cosine, which rises again.

    Source: Deng et al., 2019, arXiv:1801.07698, equation 4; the fold, Liu et al., 2017, arXiv:1704.08063, section 3.3.
    """

    s: float
    m1: float
    m2: float
    m3: float
    fold: Fold = "extend"

    def __post_init__(self) -> None:
        for name in ("s", "m1", "m2", "m3"):
            check_number(name, getattr(self, name))
        if self.s <= 0 or self.m1 <= 0:
            raise ValueError(f"s and m1 must be positive, got s={self.s} and m1={self.m1}")
        if self.m2 < 0 or self.m3 < 0:
            raise ValueError(f"m2 and m3 must not be negative, got m2={self.m2} and m3={self.m3}")
        check_choice("fold", self.fold, FOLDS)
        if self.fold == "linear" and self.m1 != 1:
            raise ValueError(f"fold='linear' is defined for m1=1 only, got m1={self.m1}; pass fold='extend'")

    def __call__(self, targets: Targets) -> Tensor:
        _check_targets(targets)
        return angular(targets, self.m1, self.m2, self.fold) - self.m3


class ArcFace(CombinedMargin):
    """ArcFace, phi = cos(theta + m): an additive angle.

    Source: Deng et al., 2019, arXiv:1801.07698, equation 3.
    """

    def __init__(self, s: float = 64.0, m: float = 0.5, *, fold: Fold = "extend") -> None:
        super().__init__(s, 1.0, m, 0.0, fold)


class CosFace(CombinedMargin):
    """CosFace, phi = cos theta - m: an additive cosine.

    Source: Wang et al., 2018, arXiv:1801.09414, equation 4.
    """

    def __init__(self, s: float = 64.0, m: float = 0.4) -> None:
        super().__init__(s, 1.0, 0.0, m)


class SphereFace(CombinedMargin):
    """SphereFace, phi = cos(m theta), which continues to fall beyond pi.

    Source: Liu et al., 2017, arXiv:1704.08063, equation 7, with a scale s instead of the norm.
    """

    def __init__(self, s: float = 64.0, m: float = 1.35) -> None:
        super().__init__(s, m, 0.0, 0.0)


class NormFace(CombinedMargin):
    """NormFace, phi = cos theta: a scaled softmax of cosines, without a margin.

    Source: Wang et al., 2017, arXiv:1704.06369, section 3.3.
    """

    def __init__(self, s: float = 64.0) -> None:
        super().__init__(s, 1.0, 0.0, 0.0)


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
        _check_targets(targets)
        (low, high), (least, most) = self.norms, self.margins
        norms = targets.norms.clamp(low, high)
        return angular(targets, 1.0, least + (most - least) * (norms - low) / (high - low), self.fold)

    def regularizer(self, targets: Targets) -> Tensor:
        """Return the regularizer of each row, (b_r, 1)."""
        norms = targets.norms.clamp(*self.norms)
        return self.weight * (1 / norms + norms / self.norms[1] ** 2)


class AdaFace(nn.Module):
    r"""AdaFace, phi = cos(theta - m u) - (m u + m): u, from the norm, stresses hard examples of good quality.

    u = clip(h (|x| - mean) / std, -1, 1),    mean and std: running averages over the global batches' norms, in
    training; |x| is clamped to [0.001, 100] and has no gradient. Rows without a label (ignore_index) do not enter the
    averages. The angle is clamped to [0, pi].

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
    def observe(self, norms: Tensor) -> None:
        """Update the running averages with the norms of all ranks' rows."""
        if self.training and len(norms) > 1:
            norms = norms.to(self.mean).clamp(*_ADAFACE_NORMS)
            self.mean.lerp_(norms.mean(), self.t_alpha)
            self.std.lerp_(norms.std(), self.t_alpha)

    def forward(self, targets: Targets) -> Tensor:
        _check_targets(targets)
        norms = targets.norms.detach().to(self.mean).clamp(*_ADAFACE_NORMS)
        u = ((norms - self.mean) / (self.std + 1e-3) * self.h).clamp(-1, 1)
        return angular(targets, 1.0, -self.m * u, "clip") - (self.m * u + self.m)


class CurricularFace(nn.Module):
    r"""CurricularFace, phi = cos(theta + m); a hard negative, c_j > cos(theta + m), is replaced by c_j (t + c_j).

    t: the running average of the targets' cosines over the global batches, in training. As it grows, hard negatives
    weigh more. Neither t nor the choice of hard negatives has a gradient.

    Args:
        s: multiplies all cosines.
        m: the margin, radians.
        alpha: the share of the new batch in the running average.
        fold: as in :class:`CombinedMargin`.

    Source: Huang et al., 2020, arXiv:2004.00288, equations 5 to 8.
    """

    t: Tensor

    def __init__(self, s: float = 64.0, m: float = 0.5, alpha: float = 0.01, *, fold: Fold = "extend") -> None:
        super().__init__()
        check_positive_number("s", s, "it multiplies cosines")
        check_weight("m", m, "0 is no margin")
        check_fraction("alpha", alpha)
        check_choice("fold", fold, FOLDS)
        self.s, self.m, self.alpha, self.fold = s, m, alpha, fold
        self.register_buffer("t", torch.zeros((), dtype=torch.float64))

    def extra_repr(self) -> str:
        return f"s={self.s}, m={self.m}, alpha={self.alpha}, fold={self.fold!r}"

    @torch.no_grad()
    def observe(self, angles: Tensor) -> None:
        """Update the running average with the target angles of all ranks' rows."""
        if self.training and len(angles):
            self.t.lerp_(angles.cos().mean(), self.alpha)

    def forward(self, targets: Targets) -> Tensor:
        _check_targets(targets)
        return angular(targets, 1.0, self.m, self.fold)

    def of_negatives(self, angles: Tensor) -> HardNegatives:
        """Return the transform of the negatives of rows with these target angles, (n, 1)."""
        return HardNegatives(self.s, float(self.t), (angles.detach() + self.m).cos().view(-1))


@dataclass(frozen=True)
class HardNegatives:
    """The transform of logits z = s c to z (t + c) where c > limit; its columns are the examples."""

    s: float
    t: float
    limits: Tensor  # (n,)

    def transform_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by their transform, in place."""
        hard = self._hard(logits, cols)
        return torch.where(hard, logits * (self.t + logits / self.s), logits, out=logits)

    def slope_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by the derivative of the transform, in place."""
        easy = ~self._hard(logits, cols)
        return logits.mul_(2 / self.s).add_(self.t).masked_fill_(easy, 1.0)

    def _hard(self, logits: Tensor, cols: slice) -> Tensor:
        return logits > self.s * self.limits[cols].to(logits.dtype)


def angular(targets: Targets, m1: float, m2: Tensor | float, fold: Fold = "extend") -> Tensor:
    """Return cos(m1 theta + m2), replaced beyond pi as `fold` says, (b_r, k)."""
    angles = m1 * targets.angles + m2
    if fold == "none":
        return angles.cos()
    if fold == "clip":
        return angles.clamp(0, math.pi).cos()
    if fold == "linear":
        lost = m2.sin() * m2 if isinstance(m2, Tensor) else math.sin(m2) * m2
        return torch.where(angles > math.pi, targets.angles.cos() - lost, angles.cos())
    turns = (angles.detach() / math.pi).floor().clamp_(min=0)
    return (1 - 2 * (turns % 2)) * angles.cos() - 2 * turns
