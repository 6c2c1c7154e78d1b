"""The operands of one call of the softmax node, and its plan, which its forward and its backward pass share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.normalize import divisors
from ..contract import Assumption, Canaries, Deferred
from ..logsumexp import cannot_underflow, passes_underflow_check
from ..sweep import Driver, KeptTiles, KernelSoftmaxSweep, Selection, SoftmaxSweep
from .route import Layout, Route
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


@dataclass(eq=False)
class Bounds:
    """Bounds of similarities that are known before any similarity is computed.

    From them the node decides whether one shift serves all logits.
    """

    similarity: float  # upper bound of the absolute value of a similarity
    # min_pair_product: lower bound of the similarity of a positive pair. None if it is unknown, or if a sum in the loss
    # contains no positive pair
    min_pair_product: float | None = None
    # add_positive: f, if the loss adds exp(f T_i) to a row's sum; 0 if it adds nothing. A sum that is far smaller than
    # this term need not be exact
    add_positive: float = 0.0
    offset: float = 0.0  # upper bound of the absolute value of the selection's offsets

    def of_logits(self, scale: float, *, error: float, pairs_count: bool, terms: int) -> LogitBounds:
        """Return the bounds of logits, where rounded rows change a similarity by this share of its bound."""
        away = error * self.similarity if error else 0.0
        min_pair = None
        if pairs_count and scale >= 0 and self.min_pair_product is not None:
            min_pair = (self.add_positive or 1) * scale * (self.min_pair_product - away)
        largest = abs(scale) * (self.similarity + away) + self.offset
        return LogitBounds(largest, min_pair, self.add_positive if pairs_count else 0.0, terms)


@dataclass(eq=False)
class LogitBounds:
    """Bounds of logits that are known before any logit is computed."""

    largest: float  # upper bound of the absolute value of a logit
    # min_pair: lower bound of the logit of a positive pair, as `min_pair_product` of :class:`Bounds`; None: unknown
    min_pair: float | None
    add_positive: float  # as in :class:`Bounds`
    terms: int  # upper bound of the number of candidates of a row or column

    def exclude_underflow(self, shift: float, dtype: torch.dtype) -> bool:
        """Return whether they show alone that no sum underflows under this shift, without waiting for a GPU."""
        if cannot_underflow(self.largest, shift, dtype):
            return True
        return self.min_pair is not None and passes_underflow_check(self.min_pair, shift, self.terms, dtype)


@dataclass(eq=False)
class SoftmaxPlan:
    """The facts that the forward and the backward pass of one call share."""

    route: Route  # the exchange of Y's rows, and the memory of tiles
    towers: Towers  # the rule by which features become X and Y
    selection: Selection  # the positives and the candidates
    guide: Tensor | None  # this rank's rows of the guide's features of Y, if the selection has a guide
    scale: float | Tensor  # of S; on the device if the host has not read it
    bounds: LogitBounds  # of logits
    shift: float | None  # one for all logits; None: their bound is too large for that
    size: int  # N, the size of the batch
    rows: tuple[str, ...]  # the fields of rows that the loss needs (see `sweep.softmax`), "sum" first; empty for none
    # cols: the fields of columns, likewise. A symmetric S has no fields of rows: its columns are its rows
    cols: tuple[str, ...]
    differentiable: bool  # whether a backward pass may follow
    in_kernels: bool  # whether Triton kernels compute the tiles that they support
    dtype: torch.dtype | None  # the dtype in which features are multiplied; None: that of the features
    canaries: Canaries | None = None  # of the group, if kernels compute the tiles
    deferred: Deferred | None = None  # the call, if the host has not read its numbers
    assumption: Assumption | None = None  # of later calls, else
    pairs_alone: bool = False  # whether the node in kernels returns the losses of pairs instead of their statistics

    @property
    def factor(self) -> float | Tensor:
        """The factor of dX and dY in the products with N dS, as kernels take it."""
        factor = self.scale / self.size
        return factor.float() if isinstance(factor, Tensor) else factor

    @property
    def symmetric(self) -> bool:
        """Whether X is Y, so that a column of S has the statistics of the same row."""
        return self.route.exchange.symmetric

    @property
    def rounds_joined(self) -> bool:
        """Whether X and Y are rounded as a whole, before Y travels; else a sweep rounds the rows of a tile."""
        towers = self.towers
        divides_later = towers.normalize_per_tile or towers.stay_norms is not None or towers.travel_norms is not None
        if self.guide is not None or divides_later or towers.stay_rows is not None:
            return False
        return self.route.products.rounds_gradients

    @property
    def keep(self) -> bool:
        """Whether exp(S) is kept for the backward pass; kernels compute it again."""
        return self.differentiable and self.route.budget.kept > 0 and not self.in_kernels

    def sweep(self, data: Data, kept: Tensor | None = None) -> SoftmaxSweep:
        """Return a sweep of X's rows."""
        group, budget, exchange = self.selection.best_of, self.route.budget, self.route.exchange
        driver = Driver(
            data.x,
            self.scale,
            side=max(1, budget.side // group) * group,  # a group lies in one tile
            largest=exchange.largest_block,
            norms=data.norms,
            col_norms=data.col_norms,
            products=self.route.products,
            index=data.index,
        )
        if self.in_kernels:
            columns, leaves = exchange.columns.total, not self.symmetric
            return KernelSoftmaxSweep(driver, self.selection, columns, leaves_divided=leaves)
        return SoftmaxSweep(driver, self.selection, kept=None if kept is None else KeptTiles(kept))


@dataclass(eq=False)
class Data:
    """The tensors from which passes over S start."""

    x: Tensor  # the local rows of X, or the feature that contains them
    fetched: Tensor  # the rows of Y that `Exchange.fetch` returned
    norms: Tensor | None  # (b, 1), divisors of X's rows, or None
    col_norms: Tensor | None  # (B, 1), divisors of Y's rows, for all columns, or None
    index: Tensor | None = None  # (b,), the places of X's rows in `x`; None: all of them

    @property
    def count(self) -> int:
        """The number of X's rows, b."""
        return len(self.x if self.index is None else self.index)

    @classmethod
    def of(cls, plan: SoftmaxPlan, x: Tensor, fetched: Tensor, norms: Tensor | None, col_norms: Tensor | None) -> Data:
        """Return the data of a plan; `norms` are those of X's rows, `col_norms` those of all of Y's rows."""
        row_norms = norms if plan.towers.normalize_per_tile else plan.towers.stay_norms
        row_divisors, col_divisors = (None if norms is None else divisors(norms) for norms in (row_norms, col_norms))
        return cls(x, fetched, row_divisors, col_divisors, plan.towers.stay_rows)
