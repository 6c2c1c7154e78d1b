"""The choice of entries of S that a softmax sums over, and the form of their logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from .pairs import Pairs

Over = Literal["negatives", "all", "positives"]


class LogitTransform(Protocol):
    """A function f that replaces each logit S by f(S); `cols` are the places of the columns in the global batch."""

    def transform_(self, logits: Tensor, cols: slice, /) -> Tensor:
        """Replace S by f(S), in place, and return it."""
        ...

    def slope_(self, logits: Tensor, cols: slice, /) -> Tensor:
        """Replace S by the factor of dS in the backward pass, f'(S) or another, in place, and return it."""
        ...


@dataclass(frozen=True)
class Selection:
    """The choice of entries that a pass sums over, and the form of their logits."""

    pairs: Pairs  # positive and excluded entries
    over: Over = "negatives"  # the candidates
    # ceiling: (b,); an entry with a logit above the ceiling of its row is no candidate. None: no limit
    ceiling: Tensor | None = None
    # guide: (b, g), the features of X's rows by another model. `ceiling` then limits the products of these with the
    # guide features of Y's rows, which each row of Y has after its own features
    guide: Tensor | None = None
    transform: LogitTransform | None = None  # replaces the logits
    offsets: Tensor | None = None  # (b,), added to a row's logits after the transform
    # best_of: the size of groups of consecutive rows; in each group, a column's only candidate is the row with the
    # largest logit
    best_of: int = 1
