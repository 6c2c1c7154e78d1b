"""What the forward and the backward pass of one softmax node have in common."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._normalize import divisors
from ..sweep import Driver, KeptTiles, KernelSoftmaxSweep, Selection, SoftmaxSweep
from .route import Route
from .towers import Towers


@dataclass(frozen=True)
class Bounds:
    """What is known of similarities before any is computed: it decides whether one shift serves all logits.

    Args:
        similarity: no similarity's absolute value is larger.
        min_pair_product: no similarity of a pair is smaller, where each sum in the loss has one pair; None: unknown.
        add_positive: f, where the loss adds exp(f T_i) to a row's sum, which need not be exact far below that; or 0.
        offset: no offset of the selection is larger, nor its negative.
    """

    similarity: float
    min_pair_product: float | None = None
    add_positive: float = 0.0
    offset: float = 0.0


@dataclass(frozen=True)
class LogitBounds:
    """The same, of logits.

    Args:
        largest: no logit is larger.
        min_pair: no logit of a pair is smaller, where each sum in the loss has one; None: unknown.
        add_positive: as in :class:`Bounds`.
        terms: the most candidates of a row or column.
    """

    largest: float
    min_pair: float | None
    add_positive: float
    terms: int


@dataclass(frozen=True)
class SoftmaxPlan:
    """What the forward and the backward pass of one call have in common.

    Args:
        route: how Y's rows travel, and the memory of tiles.
        towers: how features become X and Y.
        selection: which entries are positives and which are candidates.
        guide: this rank's rows of the guide's features of Y, if the selection has a guide.
        scale: of S.
        bounds: of logits.
        size: N, the size of the batch.
        rows, cols: the fields wanted (see `sweep.softmax`), "sum" the first; empty for none. Of a symmetric S, `cols`.
        differentiable: whether a backward pass may follow.
        in_kernels: whether Triton kernels compute the tiles that they support.
        dtype: in which features are multiplied; None: in their own.
    """

    route: Route
    towers: Towers
    selection: Selection
    guide: Tensor | None
    scale: float
    bounds: LogitBounds
    size: int
    rows: tuple[str, ...]
    cols: tuple[str, ...]
    differentiable: bool
    in_kernels: bool
    dtype: torch.dtype | None

    @property
    def symmetric(self) -> bool:
        """Whether the columns of S are its rows: their numbers are then the rows' as well."""
        return self.route.exchange.symmetric

    @property
    def keep(self) -> bool:
        """Whether exp(S) is kept for the backward pass."""
        return self.differentiable and self.route.budget.kept > 0

    def sweep(self, data: Data, kept: Tensor | None = None) -> SoftmaxSweep:
        """Return a sweep of X's rows."""
        group, budget, exchange = self.selection.best_of, self.route.budget, self.route.exchange
        driver = Driver(
            data.x,
            self.scale,
            side=max(1, budget.side // group) * group,  # no group in two tiles
            largest=exchange.largest_block,
            norms=data.norms,
            col_norms=data.col_norms,
        )
        memory = None if kept is None else KeptTiles(kept)
        if self.in_kernels:
            return KernelSoftmaxSweep(driver, self.selection, exchange.columns.total, kept=memory)
        return SoftmaxSweep(driver, self.selection, kept=memory)


@dataclass(frozen=True)
class Data:
    """What passes over S start from.

    Args:
        x: this rank's rows of X.
        held: what it holds of Y.
        norms: (b, 1), by which the sweep divides X's rows, or None.
        col_norms: (B, 1), by which it divides Y's rows, of all columns, or None.
    """

    x: Tensor
    held: Tensor
    norms: Tensor | None
    col_norms: Tensor | None

    @classmethod
    def of(cls, plan: SoftmaxPlan, x: Tensor, held: Tensor, norms: Tensor | None, col_norms: Tensor | None) -> Data:
        """Return the data of a plan, from the norms of X's rows and of all of Y's, where rows are divided by them."""
        of_rows = norms if plan.towers.normalize_per_tile else plan.towers.stay_norms
        divisors_ = [None if of is None else divisors(of) for of in (of_rows, col_norms)]
        return cls(x, held, *divisors_)
