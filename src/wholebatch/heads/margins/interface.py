"""The interface of a margin: a scale `s`, a function of angles and norms, and hooks that a margin may have.

A hook is an optional method. The softmax over classes calls the methods that a margin has, in this order, in each step:

    observe_norms    the norms of all ranks' embeddings           for running statistics of norms
    observe_angles   the target angles of all ranks' rows         for running statistics of angles
    of_negatives     the target angles -> a transform             for negatives that weigh more or less
    __call__         angles and norms of the local rows -> phi    every margin
    regularizer      angles and norms of the local rows -> terms  for a term of the loss

`observe_angles` and `of_negatives` together cost one all-reduce of B numbers. A dataclass, an `nn.Module` with buffers
and any other callable with `s` can be a margin. The observing hooks get the same numbers on all ranks, so that the
running statistics are equal without further communication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..._base.checks import check_instance
from ...sweep import LogitTransform


@dataclass(frozen=True)
class Targets:
    """The input of a margin, for the local rows.

    Args:
        angles: (b_r, k), between embeddings and their classes' centers, in [0, pi], float64; 0 without a label.
        norms: (b_r, 1), of the embeddings, float64.
    """

    angles: Tensor
    norms: Tensor


def check_targets(targets: object) -> None:
    """Raise ValueError unless a margin was called with :class:`Targets`."""
    check_instance("targets", targets, Targets, "wholebatch.heads.Targets, the angles and norms of rows")


class Margin(Protocol):
    """The interface of every margin; users may write their own."""

    @property
    def s(self) -> float:
        """The scale of the logits."""
        ...

    def __call__(self, targets: Targets) -> Tensor:
        """Return phi, (b_r, k)."""
        ...


@runtime_checkable
class ObservesNorms(Protocol):
    """The hook of a margin that keeps statistics of the embeddings' norms."""

    def observe_norms(self, norms: Tensor, /) -> None:
        """Update the statistics with the norms of all ranks' rows that have a label, (n,), float64, no gradient."""
        ...


@runtime_checkable
class ObservesAngles(Protocol):
    """The hook of a margin that keeps statistics of the target angles."""

    def observe_angles(self, angles: Tensor, /) -> None:
        """Update the statistics with the angles of all ranks' labels, (n,), float64, no gradient."""
        ...


class NegativeTransform(LogitTransform, Protocol):
    """A function f that replaces the logits z = s c of negatives by f(z), entry by entry.

    The logits are a tile: rows are classes, columns are examples, and `cols` are the places of these examples in the
    global batch. `transform_` replaces z by f(z), `slope_` by the derivative f'(z), both in place.
    """

    def bound(self, largest: float, /) -> float:
        """Return an upper bound of |f(z)| for |z| <= largest; infinity if none is known, which costs a sweep more."""
        ...


@runtime_checkable
class TransformsNegatives(Protocol):
    """The hook of a margin that transforms the logits of negatives.

    Such a margin takes one label for each example, and needs normalize="both" and no `exclude_above`.
    """

    def of_negatives(self, angles: Tensor, /) -> NegativeTransform:
        """Return the transform for examples with these target angles, (B, 1), those of all ranks; 0 without a label."""
        ...


@runtime_checkable
class Regularizes(Protocol):
    """The hook of a margin that adds a term to the loss."""

    def regularizer(self, targets: Targets, /) -> Tensor:
        """Return the term of each row, (b_r, 1), or of each label, (b_r, k); differentiable."""
        ...
