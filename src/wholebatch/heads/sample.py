"""The classes of one step on one rank: all that it holds, or a sample that depends on the labels of all ranks."""

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
        ids: (K_r,), ascending, of their classes; None: all of them, consecutive.
        bias: (K_r,), added to the logits.
        log_weights: (K_r,), added to the logits of negatives.
        complete: whether it is known that every label's class is there.
    """

    centers: Tensor
    ids: Tensor | None = None
    bias: Tensor | None = None
    log_weights: Tensor | None = None
    complete: bool = False

    @property
    def offsets(self) -> Tensor | None:
        """What is added to the logits of negatives, (K_r,), or None."""
        given = [x for x in (self.bias, self.log_weights) if x is not None]
        return sum(given[1:], start=given[0]) if given else None


@dataclass(frozen=True)
class Classes:
    """Where a loss takes the classes of a step from.

    Args:
        sample: returns this rank's part, given the labels of all ranks, (B,), or None unless `needs_labels`. It checks
            what it is made from.
        needs_labels: whether the sample depends on the labels: the loss then has a second handshake.
        dtype: of the centers.
        num_classes: C, where it is known.
        settings: by which a sample is drawn, the same on all ranks.
    """

    sample: Callable[[Tensor | None], Sample]
    dtype: torch.dtype
    num_classes: int | None
    needs_labels: bool = False
    settings: Sequence[Any] = ()
