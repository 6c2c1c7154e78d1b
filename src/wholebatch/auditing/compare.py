"""Compare two gradients: ratio, cosine, relative error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradients = Mapping[str, Tensor]
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}  # of a gradient's relative error
_SAME = 1e-6  # losses, relatively
_NOTHING = {torch.float64: 1e-8, torch.float32: 1e-5}  # of the whole gradient: a group with less has no gradient


@dataclass(frozen=True)
class Comparison:
    """The comparison of a gradient g with the true one, t.

    Where t is 0 but for rounding, the error is |g| relative to the norm of all groups' true gradient, and ratio and
    cosine are NaN.
    """

    ratio: float  # <g, t> / <t, t>
    cosine: float  # <g, t> / |g| |t|
    error: float  # |g - t| / |t|
    off_axis: float  # |g - ratio t| / |g|, the part of g that is not along t

    def verdict(self, tolerance: float) -> str:
        """Return the verdict in a word or two."""
        if not math.isfinite(self.error):
            return "not finite"
        if self.error <= tolerance:
            return "exact"
        if math.isnan(self.ratio):
            return "should be 0"
        if self.ratio == 0 and self.off_axis == 0:
            return "no gradient"
        if self.off_axis <= tolerance:
            return f"x {number(self.ratio)}"
        return "wrong direction"


def same(a: float, b: float) -> bool:
    """Return whether two losses are equal up to rounding."""
    return abs(a - b) <= _SAME * max(abs(a), abs(b), torch.finfo(torch.float32).tiny)


def number(x: float) -> str:
    """Format with at most four digits: 0.5, 3, 0.3333."""
    return f"{x:.4g}"


def compare(got: Gradients, true: Gradients, names: Sequence[str], total: float) -> Comparison:
    """Compare the gradients of some parameters; `total` is the norm of the true gradient of all parameters."""
    g, t = (torch.cat([gradients[name].double().flatten() for name in names]) for gradients in (got, true))
    g_norm, t_norm = g.norm().item(), t.norm().item()
    if t_norm <= _NOTHING[true[names[0]].dtype] * total:
        return Comparison(math.nan, math.nan, g_norm / total if total else g_norm, math.nan)
    if not math.isfinite(g_norm):
        return Comparison(math.nan, math.nan, math.inf, math.nan)
    ratio = (g @ t).item() / t_norm**2
    off_axis = (g - ratio * t).norm().item() / g_norm if g_norm else 0.0
    return Comparison(ratio, ratio * t_norm / g_norm if g_norm else math.nan, (g - t).norm().item() / t_norm, off_axis)


def wrong_groups(compared: Mapping[str, Comparison], tolerance: float) -> list[str]:
    """Return the groups whose gradient is not exact."""
    return [group for group, comparison in compared.items() if comparison.verdict(tolerance) != "exact"]


def norm(gradients: Gradients) -> float:
    """Return the norm of all gradients together."""
    return math.sqrt(sum(x.double().square().sum().item() for x in gradients.values()))


def inner(gradients: Gradients, direction: Gradients) -> float:
    """Return <g, v> over the direction's parameters."""
    return sum((gradients[name].double() * v.double()).sum().item() for name, v in direction.items())


def grouped(gradients: Gradients) -> dict[str, list[str]]:
    """Group parameters by their module, at the first depth with two different modules; each scalar is a group.

    >>> shapes = {"net.image.weight": (2, 3), "net.image.bias": (2,), "net.text.weight": (2, 3), "net.scale": ()}
    >>> grouped({name: torch.zeros(shape) for name, shape in shapes.items()})
    {'net.image': ['net.image.weight', 'net.image.bias'], 'net.text': ['net.text.weight'], 'net.scale': ['net.scale']}
    """
    depth, paths = 1, {name: name.split(".") for name, x in gradients.items() if x.numel() > 1}
    while paths and len({tuple(path[:depth]) for path in paths.values()}) == 1 < max(map(len, paths.values())) - depth:
        depth += 1
    groups: dict[str, list[str]] = {}
    for name in gradients:
        groups.setdefault(".".join(paths[name][:depth]) if name in paths else name, []).append(name)
    return groups


def directions(true: Gradients, groups: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Tensor]]:
    """Return a unit vector for each group, half along its true gradient and half random."""
    generator = torch.Generator().manual_seed(0)
    units = {}
    for group, names in groups.items():
        chance = {name: torch.randn(true[name].shape, generator=generator, dtype=torch.float64) for name in names}
        along = {name: true[name].double() for name in names}
        chance_norm, along_norm = norm(chance), norm(along)
        mixed = {name: chance[name] / chance_norm + (along[name] / along_norm if along_norm else 0) for name in names}
        if sum(x.numel() for x in mixed.values()) == 1:  # one direction and its opposite
            mixed = {name: torch.ones_like(x) for name, x in mixed.items()}
        whole = norm(mixed)
        units[group] = {name: x / whole for name, x in mixed.items()}
    return units
