r"""Margins that are functions of the angle alone: phi = cos(m1 theta + m2) - m3 and its special cases.

    ArcFace       phi = cos(theta + m)                    CosFace      phi = cos theta - m
    SphereFace    phi = cos(m theta)                      NormFace     phi = cos theta

The gradient is that of the same function, d phi / d theta = -m1 sin(m1 theta + m2). The derivative by the cosine, the
usual form, is m1 sin(m1 theta + m2) / sin theta, unbounded at 0 and pi; that by the angle (see `angles`) is bounded.

Beyond m1 theta + m2 = pi the cosine rises again, so that a larger angle would be rewarded. `fold` replaces it there.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..._base.angular_margin import AngularMargin, Fold
from .interface import Targets, check_targets


class CombinedMargin(AngularMargin):
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

    def __call__(self, targets: Targets) -> Tensor:
        check_targets(targets)
        phi = angular(targets, self.m1, self.m2, self.fold)
        return phi - self.m3 if self.m3 else phi


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


def angular(targets: Targets, m1: float, m2: Tensor | float, fold: Fold = "extend") -> Tensor:
    """Return cos(m1 theta + m2), replaced beyond pi as `fold` says, (b_r, k); m1 theta + m2 > -pi."""
    angles = targets.angles if m1 == 1 else m1 * targets.angles
    if isinstance(m2, Tensor) or m2:
        angles = angles + m2
    if fold == "none":
        return angles.cos()
    if fold == "clip":
        return angles.clamp(0, math.pi).cos()
    if fold == "linear":
        lost = m2.sin() * m2 if isinstance(m2, Tensor) else math.sin(m2) * m2
        return torch.where(angles > math.pi, targets.angles.cos() - lost, angles.cos())
    rest = angles.fmod(math.pi)  # (-1)^k cos(rest + k pi) = cos(rest)
    return torch.sub(rest.cos(), (angles - rest).detach(), alpha=2 / math.pi)
