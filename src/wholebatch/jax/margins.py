"""Margins: functions that lower the logit of an example's own class, given its angle to the class's center.

The same as :mod:`wholebatch.heads.margins`, where they are derived. Any function of angles and norms is accepted.
"""

from __future__ import annotations

from math import pi
from typing import Protocol

import jax.numpy as jnp
from jax import Array, lax

from .._base.angular_margin import AngularMargin, Fold


class Margin(Protocol):
    """The protocol of margins, your own included: hashable, because tracing caches it, such as a frozen dataclass."""

    @property
    def s(self) -> float:
        """The scale of the logits."""
        ...

    def __call__(self, angles: Array, norms: Array) -> Array:
        """Return phi, (b,), from the angles between embeddings and their centers, and the embeddings' norms."""
        ...


class CombinedMargin(AngularMargin):
    """phi = cos(m1 theta + m2) - m3, with scale s, and beyond m1 theta + m2 = pi as `fold` says.

    Args and errors are those of :class:`wholebatch.CombinedMargin`.

    Source: Deng et al., 2019, arXiv:1801.07698, equation 4; the fold, Liu et al., 2017, arXiv:1704.08063, section 3.3.
    """

    def __call__(self, angles: Array, norms: Array) -> Array:
        return angular(angles, self.m1, self.m2, self.fold) - self.m3


class ArcFace(CombinedMargin):
    """phi = cos(theta + m): a margin added to the angle.

    Source: Deng et al., 2019, arXiv:1801.07698, equation 3.
    """

    def __init__(self, s: float = 64.0, m: float = 0.5, *, fold: Fold = "extend") -> None:
        super().__init__(s, 1.0, m, 0.0, fold)


class CosFace(CombinedMargin):
    """phi = cos theta - m: a margin subtracted from the cosine.

    Source: Wang et al., 2018, arXiv:1801.09414, equation 4.
    """

    def __init__(self, s: float = 64.0, m: float = 0.4) -> None:
        super().__init__(s, 1.0, 0.0, m)


class SphereFace(CombinedMargin):
    """phi = cos(m theta), which keeps falling beyond pi: a margin that multiplies the angle.

    Source: Liu et al., 2017, arXiv:1704.08063, equation 7, with a scale s instead of the norm.
    """

    def __init__(self, s: float = 64.0, m: float = 1.35) -> None:
        super().__init__(s, m, 0.0, 0.0)


class NormFace(CombinedMargin):
    """phi = cos theta: a scaled softmax of cosines, without a margin.

    Source: Wang et al., 2017, arXiv:1704.06369, section 3.3.
    """

    def __init__(self, s: float = 64.0) -> None:
        super().__init__(s, 1.0, 0.0, 0.0)


def angular(angles: Array, m1: float, m2: Array | float, fold: Fold = "extend") -> Array:
    """Return cos(m1 theta + m2), continued beyond pi as `fold` says."""
    moved = m1 * angles + m2
    if fold == "none":
        return jnp.cos(moved)
    if fold == "clip":
        return jnp.cos(jnp.clip(moved, 0, pi))
    if fold == "linear":
        return jnp.where(moved > pi, jnp.cos(angles) - jnp.sin(m2) * m2, jnp.cos(moved))
    turns = lax.stop_gradient(jnp.maximum(jnp.floor(moved / pi), 0))
    return (1 - 2 * (turns % 2)) * jnp.cos(moved) - 2 * turns
