"""The classes of one step on one rank: all local classes, or a sample that depends on the labels of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_finite
from .._base.precision import accumulation_dtype

# The largest absolute value of an offset where label smoothing adds up all logits: their sum is finite.
_LARGEST_IN_SUMS = {torch.float32: 2.0**100, torch.float64: 2.0**1000}
_SUM = "bias + log_weights"


@dataclass(frozen=True)
class Sample:
    """A rank's part of the classes of one step.

    With `rows`, (K_r,) and ascending, these rows of `centers` are the sample: they are not copied, and the gradient of
    `centers` is sparse. Such a sample was drawn for the labels of all ranks, and has the class of each.
    """

    centers: Tensor  # (K_r, d), or (K_r, K, d): K sub-centers of each class; with `rows`, centers that contain these
    ids: Tensor | None = None  # (K_r,), ascending, the ids of their classes; None: all local classes, consecutive
    bias: Tensor | None = None  # (K_r,), added to the logits
    log_weights: Tensor | None = None  # (K_r,), added to the logits of negatives
    rows: Tensor | None = None

    @property
    def count(self) -> int:
        """The number of classes, K_r."""
        return len(self.centers if self.rows is None else self.rows)

    def offsets(self) -> dict[str, Tensor]:
        """Return the numbers added to the logits of negatives, each (K_r,), and the sum of several."""
        terms = {"bias": self.bias, "log_weights": self.log_weights}
        parts = {name: x.to(accumulation_dtype(x.dtype)) for name, x in terms.items() if x is not None}
        return parts if len(parts) < 2 else {**parts, _SUM: parts["bias"] + parts["log_weights"]}

    @torch.no_grad()
    def largest_offsets(self) -> dict[str, Tensor]:
        """Return the largest absolute value of each of `offsets`, shape (); without classes 0."""
        return {name: x.abs().amax() if len(x) else x.new_zeros(()) for name, x in self.offsets().items()}


@dataclass(frozen=True)
class Classes:
    """The classes of a step before the ranks have agreed on it.

    `sample` returns this rank's part of the classes, or raises ValueError. It gets the labels of all ranks, (B, k), if
    it `needs_labels`, else None.
    """

    sample: Callable[[Tensor | None], Sample]
    dtype: torch.dtype  # of the centers
    num_classes: int | None  # C, if known
    needs_labels: bool = False  # the loss then makes a second handshake
    settings: Sequence[Any] = ()  # of the draw, the same on all ranks
    tensors: Sequence[Tensor | None] = ()  # those of which a sample without labels consists
    step: float = 0.0  # of the draw, the same on all ranks


def sum_of(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of the parts that are not None, or None."""
    terms = [x for x in parts if x is not None]
    return sum(terms[1:], start=terms[0]) if terms else None


def check_offset_values(sample: Sample, largest: Mapping[str, float], *, smoothed: bool) -> float:
    """Return an upper bound of the offsets' absolute values, from the numbers that `largest_offsets` names.

    An offset that is NaN or infinite is a ValueError; so is one so large that a sum of logits may leave the range of
    the dtype, where label smoothing adds up all logits (`smoothed`).
    """
    dtype, bound = accumulation_dtype(sample.centers.dtype), 0.0
    limit = _LARGEST_IN_SUMS[dtype] if smoothed else torch.finfo(dtype).max
    for name in [name for name in ("bias", "log_weights", _SUM) if name in largest]:
        bound = largest[name]
        if not bound <= limit:
            check_finite(name, sample.offsets()[name])
            rounded = 10.0 ** math.floor(math.log10(limit))
            raise ValueError(
                f"{name} must have absolute values up to {rounded:g} with label_smoothing, got {bound:g}; "
                f"-{rounded:g} is enough to leave a class out of the softmax"
            )
    return bound
