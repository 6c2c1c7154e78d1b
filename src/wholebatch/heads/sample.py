"""The classes of one step on one rank: all local classes, or a sample that depends on the labels of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """A rank's part of the classes of one step.

    Args:
        centers: (K_r, d), or (K_r, K, d): K sub-centers of each class.
        ids: (K_r,), ascending, the ids of their classes; None: all local classes, consecutive.
        bias: (K_r,), added to the logits.
        log_weights: (K_r,), added to the logits of negatives.
        complete: whether the sample is known to include the class of every label.
    """

    centers: Tensor
    ids: Tensor | None = None
    bias: Tensor | None = None
    log_weights: Tensor | None = None
    complete: bool = False

    @property
    def offsets(self) -> Tensor | None:
        """The offsets added to the logits of negatives, (K_r,), or None."""
        return sum_of(self.bias, self.log_weights)


@dataclass(frozen=True)
class Classes:
    """The source of the classes of a step.

    Args:
        sample: a function that validates its source and returns this rank's part. It gets the labels of all ranks,
            (B, k), or None unless `needs_labels`.
        needs_labels: whether the sample depends on the labels; the loss then makes a second handshake.
        dtype: of the centers.
        num_classes: C, if known.
        settings: the settings of the draw, which must be the same on all ranks.
    """

    sample: Callable[[Tensor | None], Sample]
    dtype: torch.dtype
    num_classes: int | None
    needs_labels: bool = False
    settings: Sequence[Any] = ()


def sum_of(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of the parts that are not None, or None."""
    found = [x for x in parts if x is not None]
    return sum(found[1:], start=found[0]) if found else None
