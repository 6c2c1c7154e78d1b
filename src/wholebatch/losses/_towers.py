"""From a loss's features to X, whose rows stay, and Y, whose rows travel; and from dX and dY back to the features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from .._normalize import divisors, known_norms, project_
from .._precision import accumulation_dtype, rows_at_a_time, wide_dtype

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(frozen=True)
class Towers:
    """X = the features `stays`, one below the other, Y = the features `travels`; without those, Y is X.

    With `normalize`, the rows of X and Y are those of the features divided by their norms. With `stay_norms`, (b, 1),
    X's rows are divided by these, but never all at once: X holds them as they are, the sweep divides. So are Y's with
    `travel_norms`, (B, 1), of all of Y's rows, which this rank then holds; and so is all that is normalized, if `late`.
    """

    stays: tuple[int, ...]
    travels: tuple[int, ...] = ()
    normalize: bool = False
    late: bool = False
    stay_norms: Tensor | None = None
    travel_norms: Tensor | None = None

    def join(self, features: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
        """X, Y, and the norms of X's rows if they are or will be divided by them."""
        if self.normalize:
            assert not self.travels, "only features against themselves are normalized here; please report this"
            x, norms = (_with_norms if self.late else _normalized)([features[i] for i in self.stays])
            return x, x, norms
        x = _stacked([features[i] for i in self.stays])
        return x, _stacked([features[i] for i in self.travels]) if self.travels else x, self.stay_norms

    def wanted(self, features: Sequence[bool]) -> tuple[bool, bool]:
        """Whether dX and dY are needed, given which features' gradients are."""
        x, y = (any(features[i] for i in at) for at in (self.stays, self.travels))
        return (x, y) if self.travels else (False, x)

    def split(
        self,
        dx: Tensor | None,
        dy: Tensor | None,
        x: Tensor,
        y: Tensor,
        norms: Tensor | None,
        features: Sequence[tuple[bool, int, torch.dtype]],
    ) -> list[Tensor | None]:
        """The features' gradients, from dX and dY, which are overwritten.

        Args:
            dx: None where not needed.
            dy: None where not needed. Where Y is X, all of the gradient is here.
            x: from `join`.
            y: from `join`.
            norms: from `join`.
            features: of each, whether its gradient is needed, its rows, its dtype.
        """
        if self.stay_norms is not None and dx is not None:
            project_(dx, x, self.stay_norms, divide=True)
        elif norms is not None and dy is not None:
            project_(dy, x, norms, divide=self.late)
        if self.travel_norms is not None and dy is not None:
            project_(dy, y, self.travel_norms, divide=True)
        grads: list[Tensor | None] = [None] * len(features)
        for at, gradient in ((self.stays, dx if self.travels else dy), (self.travels, dy)):
            first = 0
            for i in at:
                needed, rows, dtype = features[i]
                if needed:
                    assert gradient is not None
                    grads[i] = gradient[first : first + rows].to(dtype)
                first += rows
        return grads


def _stacked(features: Sequence[Tensor]) -> Tensor:
    return features[0] if len(features) == 1 else torch.cat(list(features))


def _normalized(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All rows normalized, in the accumulation dtype, and their norms, (rows, 1)."""
    rows, width = sum(map(len, features)), features[0].shape[1]
    z = features[0].new_empty(rows, width, dtype=accumulation_dtype(features[0].dtype))
    for part, feature in zip(z.split([len(feature) for feature in features]), features, strict=True):
        part.copy_(feature)
    norms = known_norms(z)
    return z.div_(divisors(norms)), norms


def _with_norms(features: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """All rows as they are, and their norms, (rows, 1), in the accumulation dtype."""
    x = _stacked(features)
    return x, known_norms(x)


def inner(a: Tensor, b: Tensor | None, divided_by: Tensor | None = None) -> Tensor:
    """<a, b>, of a's rows divided by these numbers, (rows, 1), if given.

    In float64: the gradient of a learnable scale is a small difference of large numbers. Some rows at a time, which are
    widened.
    """
    assert b is not None, "a learnable scale always comes with U or V; please report this"
    total = torch.zeros((), dtype=wide_dtype(b.device), device=b.device)
    rows = rows_at_a_time(b.device) // 8  # each three times, in float64
    for at in range(0, len(b), rows):
        some = slice(at, at + rows)
        products = torch.linalg.vecdot(a[some].to(total.dtype), b[some].to(total.dtype))
        total += (products if divided_by is None else products / divided_by[some, 0]).sum(dtype=total.dtype)
    return total


@torch.no_grad()
def paired_products(x: Tensor, y: Tensor) -> Tensor:
    """x_i . y_i in the accumulation dtype, (rows,), some rows at a time."""
    dtype = accumulation_dtype(x.dtype)
    parts = zip(x.split(rows_at_a_time(x.device)), y.split(rows_at_a_time(x.device)), strict=True)
    return torch.cat([torch.linalg.vecdot(a.to(dtype), b.to(dtype)) for a, b in parts])


def no_autocast(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator: what is inside runs in the dtypes that it was given; the device is that of the last tensor."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensors = [arg for arg in (*kwargs.values(), *args) if isinstance(arg, Tensor)]
        device = tensors[-1].device.type if tensors else "cpu"
        if not torch.amp.is_autocast_available(device):  # a tensor without data, which the door will refuse
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return run
