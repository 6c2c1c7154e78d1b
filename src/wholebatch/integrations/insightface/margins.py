"""The margins of insightface's losses.py as margins of this library, recognized by their class names and attributes.

    CombinedMarginLoss   phi = cos(theta + m2) if m1 = 1 and m3 = 0; phi = cos theta - m3 if m3 > 0
    ArcFace, CosFace     the same with `margin` and `m`

Their cos(theta + m2) rises again beyond pi. An edited class under one of these names would train differently, so each
is called once with a few cosines, and its logits and their slopes are compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..._base.settings import shown
from ...heads.margins import CombinedMargin
from ...heads.margins.interface import Margin, Targets

_ATTRIBUTES = {
    "CombinedMarginLoss": ("s", "m1", "m2", "m3", "interclass_filtering_threshold"),
    "ArcFace": ("s", "margin"),
    "CosFace": ("s", "m"),
}
_CLOSE = 1e-6  # of the scale: they may compute in float32


@dataclass(frozen=True)
class FilteredMargin(CombinedMargin):
    """A combined margin whose negatives have logit 0, and no gradient, where their cosine is above a threshold.

    Args:
        threshold: the cosine.
    """

    threshold: float = 1.0

    def of_negatives(self, angles: Tensor) -> Filter:
        """Return the transform of the negatives' logits; it does not depend on the target angles."""
        return Filter(self.s * self.threshold)


@dataclass(frozen=True)
class Filter:
    """The transform of logits that replaces those above a limit by 0."""

    limit: float

    def transform_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by their transform, in place, and return them."""
        return logits.masked_fill_(logits > self.limit, 0.0)

    def slope_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by the derivative of the transform, in place, and return them."""
        return logits.le_(self.limit)

    def bound(self, largest: float) -> float:
        """Return an upper bound of a transformed logit, from one of the logits."""
        return largest


def is_own(margin_loss: object) -> bool:
    """Return whether this is a margin of this library: it has a scale `s` and is called with one argument."""
    if not callable(margin_loss) or isinstance(margin_loss, type) or not hasattr(margin_loss, "s"):
        return False
    call = margin_loss.forward if isinstance(margin_loss, nn.Module) else margin_loss
    try:
        inspect.signature(call).bind(None)
    except TypeError:
        return False
    return True


def numbers_of(margin_loss: object) -> dict[str, Any]:
    """Return the numbers of one of their margins by the names of its attributes.

    Raises:
        ValueError: for another object.
    """
    names = _ATTRIBUTES.get(type(margin_loss).__name__, ())
    if not names or isinstance(margin_loss, type) or not all(hasattr(margin_loss, name) for name in names):
        raise ValueError(
            "margin_loss must be a CombinedMarginLoss, ArcFace or CosFace of insightface's losses.py, or a margin of "
            f"this library such as wholebatch.ArcFace(64.0, 0.5), got {shown(margin_loss)}; write it as a "
            "wholebatch.heads.Margin: an object with a scale s that is called with the angles"
        )
    return {name: getattr(margin_loss, name) for name in names}


def margin_of(margin_loss: object) -> Margin:
    """Return the margin of this library that computes the logits of one of theirs.

    Raises:
        ValueError: if the object is none of theirs, or computes other logits than insightface's class of this name.
    """
    name, numbers = type(margin_loss).__name__, numbers_of(margin_loss)
    s, threshold = numbers["s"], numbers.get("interclass_filtering_threshold", 0)
    m2, m3 = _margins(numbers)
    if threshold > 0:
        margin: CombinedMargin = FilteredMargin(s, 1.0, m2, m3, "none", float(threshold))
    else:
        margin = CombinedMargin(s, 1.0, m2, m3, "none")
    if not _computes(margin_loss, margin, threshold):
        raise ValueError(
            f"margin_loss must compute the logits of insightface's {name}, got a class of that name with other logits "
            "or gradients; write it as a wholebatch.heads.Margin: an object with a scale s that is called with the "
            "angles"
        )
    return margin


def _margins(numbers: Mapping[str, Any]) -> tuple[float, float]:
    """Return m2 and m3 of the formula that their class computes."""
    if "m1" not in numbers:
        return numbers.get("margin", 0.0), numbers.get("m", 0.0)
    m1, m2, m3 = (numbers[name] for name in ("m1", "m2", "m3"))
    if m1 == 1.0 and m3 == 0.0:
        return m2, 0.0
    given = f"CombinedMarginLoss with m1={m1}, m2={m2}, m3={m3}"
    if m3 > 0 and (m1 != 1.0 or m2 != 0.0):
        raise ValueError(
            f"margin_loss must have m1=1 and m2=0 where m3 > 0, got a {given}: insightface's class ignores m1 and m2 "
            f"there; pass CombinedMarginLoss(s, 1.0, 0.0, {m3}) to train as it does, or wholebatch.CombinedMargin(s, "
            "m1, m2, m3) for all three"
        )
    if not m3 > 0:
        raise ValueError(
            f"margin_loss must have m1=1 and m3=0, or m3 > 0, got a {given}: insightface's class has no logits for it; "
            "pass wholebatch.CombinedMargin(s, m1, m2, m3)"
        )
    return 0.0, m3


def _computes(margin_loss: Any, margin: CombinedMargin, threshold: float) -> bool:
    """Return whether their margin computes these logits, with a slope s wherever a logit depends on its cosine."""
    cosines = torch.linspace(-0.95, 0.93, 18, dtype=torch.float64, device="cpu").view(6, 3)
    labels = torch.tensor([0, 1, 2, 0, 1, -1], device="cpu")
    target = torch.arange(3, device="cpu") == labels[:, None]
    dropped = (cosines > threshold) & ~target if threshold > 0 else torch.zeros_like(target)
    phi = margin(Targets(cosines.acos(), torch.ones_like(cosines)))
    expected = margin.s * torch.where(target, phi, cosines.masked_fill(dropped, 0.0))
    try:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):
            leaf = cosines.clone().requires_grad_()
            logits = margin_loss(leaf.clamp(-1, 1), labels[:, None].clone())  # theirs writes into what it gets
            (slope,) = torch.autograd.grad(logits.sum(), leaf)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    same = (logits.detach() - expected).abs().max() <= _CLOSE * margin.s
    return bool(same and (slope - margin.s * (~dropped).double()).abs().max() <= _CLOSE * margin.s)
