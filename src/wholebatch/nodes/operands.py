"""The operands of the softmax node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .route import Layout
from .towers import Towers


@dataclass(eq=False)
class Operands:
    """X and Y of one call."""

    features: Sequence[Tensor]  # the features that `towers` joins
    towers: Towers  # the features of X, the features of Y, and their normalization
    layout: Layout  # the owners of the rows of X and Y
    guide: Tensor | None = None  # the guide's features of this rank's rows of Y, if the selection has a guide
    # narrow: whether the features were widened (`facts.widened()`) and are multiplied in the narrower dtype that they
    # had before, which loses nothing
    narrow: bool = False
