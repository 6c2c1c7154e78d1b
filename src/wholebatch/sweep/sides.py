"""The statistics of rows or of columns of S, and a loss's derivatives by them, in the letters of `softmax`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """The statistics of rows or of columns so far; a pass adds to them."""

    shift: Tensor | float  # one for all rows, or (n,)
    fields: Mapping[str, Tensor]  # each (n,)

    def __getitem__(self, part: slice) -> Sums:
        return Sums(_part_of(self.shift, part), {name: field[part] for name, field in self.fields.items()})


@dataclass(frozen=True)
class Weights:
    """A loss's derivatives by the statistics of rows or of columns."""

    shift: Tensor | float
    exponential_weights: Tensor  # a_i / R_i
    target_weights: Tensor | None  # t_i
    logit_weights: Tensor | None  # m_i

    def __getitem__(self, part: slice) -> Weights:
        targets, logits = (None if x is None else x[part] for x in (self.target_weights, self.logit_weights))
        return Weights(_part_of(self.shift, part), self.exponential_weights[part], targets, logits)

    def named(self) -> dict[str, Tensor]:
        """Return the derivatives that are not None, under the names of the fields of :class:`Sums`."""
        parts = {"sum": self.exponential_weights, "target": self.target_weights, "logits": self.logit_weights}
        return {name: part for name, part in parts.items() if part is not None}

    def stacked(self) -> Tensor:
        """Return the derivatives and the shift as one tensor, (k, n), to travel with the columns."""
        parts = (self.exponential_weights, self.target_weights, self.logit_weights, self.shift)
        return torch.stack([part.to(self.exponential_weights) for part in parts if isinstance(part, Tensor)])

    def unstacked(self, rows: Tensor) -> Weights:
        """Return the weights of other columns, from their `stacked` form."""
        remaining = iter(rows)
        parts = (self.exponential_weights, self.target_weights, self.logit_weights, self.shift)
        values = [next(remaining) if isinstance(part, Tensor) else part for part in parts]
        exponentials, targets, logits, shift = values
        assert isinstance(exponentials, Tensor)
        assert not isinstance(targets, float)
        assert not isinstance(logits, float)
        assert shift is not None
        return Weights(shift, exponentials, targets, logits)


def one_shift(rows: Sums | Weights | None, cols: Sums | Weights | None) -> float | None:
    """Return the shift that all entries share; None if each row and column has its own."""
    side = rows if rows is not None else cols
    assert side is not None
    return None if isinstance(side.shift, Tensor) else side.shift


def _part_of(shift: Tensor | float, part: slice) -> Tensor | float:
    return shift[part] if isinstance(shift, Tensor) else shift
