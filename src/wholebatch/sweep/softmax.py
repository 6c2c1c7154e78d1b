"""The softmax sweep: statistics of each row and column from tiles of S, and dX and dY from tiles of dS.

A pass over S accumulates statistics of each row i, and in the same form of each column j. Their fields are

    sum        R_i = sum_j exp(S_ij - c)      over the candidates; c is a shift (see `logsumexp`)
    target     T_i = sum_j S_ij               over the positives
    logits     M_i = sum_j S_ij               over the candidates
    count      sum_j 1                        over the candidates
    largest    max_j S_ij                     over the candidates that are not positive
    negatives  sum_j exp(S_ij - c)            over the candidates that are not positive
    squares    sum_j exp(2 (S_ij - c))        over the candidates that are not positive

The candidates are the negatives ("negatives"), positives and negatives ("all"), or the positives ("positives"). With
"positives", the last three are over the positives, also the field that is called `negatives`.

A loss is any differentiable function of A_i = c + log R_i, T_i and M_i. With its derivatives a_i, t_i, m_i by the rows'
statistics, and a'_j, t'_j, m'_j by the columns',

    dS_ij = E_ij (a_i / R_i + a'_j / C_j)     of candidates, E = exp(S - c)
          + m_i + m'_j                        of candidates
          + t_i + t'_j                        of positives

With one shift for all, rows and columns use the same E. Forward: 1 unit of multiply-adds and one exponential per entry.
Backward: 3 units and one exponential, or 2 units and no exponential for entries whose E was kept.

If a row has one positive, its cross-entropy is softplus(A_i - T_i) with A over the negatives. Then dS contains no
difference of numbers near 1, and loss and gradient of a well separated row vanish, as they should. If positives are
candidates, the two terms of their dS are added in float64, inside the tile.

A symmetric S (features against themselves) needs only the tiles on and above the diagonal: the column sums of a tile
are the row sums of the mirrored tile, and dS + dS^T has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..partition import Tile
from .driver import Block, Driver, relative
from .memory import KeptTiles
from .pairs import Index
from .products import Factor
from .selection import Selection
from .sides import Sums, Weights, one_shift

_T = TypeVar("_T")


class SoftmaxSweep:
    """Pass over the blocks of S, in the same order each time.

    Args:
        driver: of the rows.
        selection: the entries that are summed over.
        kept: memory for E, written by `sums` and read by `gradients`; None: E is computed again.
    """

    divided = False  # whether `gradients` leaves U divided by the norms of its rows

    def __init__(self, driver: Driver, selection: Selection, *, kept: KeptTiles | None = None) -> None:
        self.driver, self.selection, self.kept = driver, selection, kept
        self._device, self._wide = driver.x.device, wide_dtype(driver.x.device)

    def maxima(self, block: Block, rows: Tensor | None, cols: Tensor | None) -> None:
        """Raise `rows` (b,) and `cols` (n,), unless None, to the largest logits of the block's candidates."""
        for tile, x, y in self.driver.tiles(block):
            logits = self._candidates(tile, block, x, y).logits
            for largest, part, dim in _sides(tile, block, rows, cols):
                largest[part] = torch.maximum(largest[part], logits.amax(dim))

    def sums(self, block: Block, rows: Sums | None, cols: Sums | None) -> None:
        """Add the block's part to the fields of `rows` and `cols`, unless None."""
        shift = one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            sides = [(side[part], dim) for side, part, dim in _sides(tile, block, rows, cols)]
            entries = self._candidates(tile, block, x, y)
            for side, dim in sides:
                self._sum_logits(entries, side.fields, dim)
            if shift is None:
                for side, dim in sides:
                    exponentials = self._exp(entries.logits, side.shift, tile, dim)
                    self._sum_exponentials(exponentials, entries.positives, [(side, dim)])
                continue
            exponentials = _exp_(entries.logits, shift)
            if self.kept is not None:
                self.kept.keep(exponentials)
            self._sum_exponentials(exponentials, entries.positives, sides)

    def gradients(
        self,
        block: Block,
        rows: Weights | None,
        cols: Weights | None,
        u: Tensor | None,
        v: Tensor | None,
        offset_grads: Tensor | None = None,
    ) -> None:
        """Add dS Y to `u` (b, d), dS^T X to `v` (n, d) and dS 1 to `offset_grads` (b,), unless None."""
        shift = one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            sides = [] if rows is None else [(rows[tile.rows], 1)]
            if cols is not None:  # also for a tile on the diagonal of a symmetric S: its gradient is dS + dS^T
                sides.append((cols[relative(tile.cols, block)], 0))
            grad, slope, pairs = self._gradient(tile, block, x, y, sides, shift, whole=offset_grads is not None)
            if offset_grads is not None:
                if pairs is not None:
                    grad[pairs[0]] = pairs[1].to(grad.dtype)
                offset_grads[tile.rows].add_(grad.sum(1))
            if slope is not None:
                grad.mul_(slope)
                pairs = None if pairs is None else (pairs[0], pairs[1] * slope[pairs[0]])
            self.driver.products(grad, tile, x, y, block, u, v, pairs)

    # A tile of S: its candidates, and their part of the statistics of rows or columns (`dim` is summed over).

    def _candidates(self, tile: Tile, block: Block, x: Factor, y: Factor, *, slope: bool = False) -> _Entries:
        """Return the tile of S, with -inf for entries that are no candidates; with `slope`, also the transform's."""
        selection, logits = self.selection, self.driver.logits(tile, x, y)
        positives = selection.pairs.positive.within(tile, self._device)
        if selection.best_of > 1:
            _keep_largest_of_group_(logits, selection.best_of)
        slopes = None
        if selection.transform is not None:
            if slope:
                slopes = selection.transform.slope_(self.driver.spare(tile).copy_(logits), tile.cols)
            selection.transform.transform_(logits, tile.cols)
        if selection.offsets is not None:
            logits.add_(selection.offsets[tile.rows, None])
        values = None if positives is None else logits[positives]
        if selection.ceiling is not None:
            compared = logits if selection.guide is None else self._guide(selection.guide, tile, block)
            logits.masked_fill_(compared > selection.ceiling[tile.rows, None], float("-inf"))
        excluded = selection.pairs.excluded.within(tile, self._device)
        if excluded is not None:
            logits[excluded] = float("-inf")
        if selection.over == "positives":
            logits.fill_(float("-inf"))
        if positives is not None and values is not None:
            logits[positives] = float("-inf") if selection.over == "negatives" else values
        return _Entries(logits, positives, values, slopes)

    def _guide(self, guide: Tensor, tile: Tile, block: Block) -> Tensor:
        """Return the guide's similarities, in the scratch tile; a row of Y ends with its guide features."""
        guide_cols = block.y[relative(tile.cols, block), self.driver.width :].to(self.driver.dtype)
        return torch.mm(guide[tile.rows], guide_cols.T, out=self.driver.scratch(tile))

    def _sum_logits(self, entries: _Entries, fields: Mapping[str, Tensor], dim: int) -> None:
        """Update the fields that are sums or maxima of the logits themselves."""
        logits, positives, values = entries.logits, entries.positives, entries.values
        if "target" in fields and positives is not None and values is not None:
            fields["target"].index_add_(0, positives[1 - dim], values.to(self._wide))
        if "logits" in fields:
            candidate = logits > float("-inf")
            fields["count"].add_(candidate.sum(dim))
            fields["logits"].add_(torch.where(candidate, logits, 0.0).sum(dim))
        if "largest" in fields:
            has_positives = self.selection.over == "all" and positives is not None
            if has_positives:
                kept, logits[positives] = logits[positives], float("-inf")
            fields["largest"].copy_(torch.maximum(fields["largest"], logits.amax(dim)))
            if has_positives:
                logits[positives] = kept

    def _sum_exponentials(self, exponentials: Tensor, positives: Index | None, sides: list[tuple[Sums, int]]) -> None:
        """Update the fields that are sums of exponentials; with 'squares' the exponentials are overwritten."""
        for side, dim in sides:
            side.fields["sum"].add_(exponentials.sum(dim))
        if not any("squares" in side.fields for side, _ in sides):
            return
        if positives is not None and self.selection.over == "all":
            exponentials[positives] = 0.0
        for side, dim in sides:
            side.fields["negatives"].add_(exponentials.sum(dim))
        squares = exponentials.to(self._wide).square_()  # wide: the exponentials may be near the largest float32
        for side, dim in sides:
            side.fields["squares"].add_(squares.sum(dim))

    # A tile of dS, from the weights of its rows and columns.

    def _gradient(
        self,
        tile: Tile,
        block: Block,
        x: Factor,
        y: Factor,
        sides: list[tuple[Weights, int]],
        shift: float | None,
        *,
        whole: bool,
    ) -> tuple[Tensor, Tensor | None, tuple[Index, Tensor] | None]:
        """Return the gradient by the transformed logits, the slope of the transform, and the gradients of positives.

        The tile is in the precision of products, unless `whole` or a slope needs all its digits.
        """
        kept = None if self.kept is None else self.kept.next(tile.shape)
        if kept is None:
            entries = self._candidates(tile, block, x, y, slope=True)
        else:
            entries = _Entries(kept, self.selection.pairs.positive.within(tile, self._device))
        positives, exponentials = entries.positives, entries.logits
        uniform = [side.logit_weights.unsqueeze(dim) for side, dim in sides if side.logit_weights is not None]
        candidate = exponentials > float("-inf") if uniform else None
        if kept is None and shift is not None:
            _exp_(exponentials, shift)
        elif kept is not None and kept.dtype != self.driver.dtype:
            exponentials = self.driver.buffer(tile).copy_(kept)
        pair_grad = None if positives is None else self._pair_gradient(exponentials, positives, sides)

        if shift is None:
            grad = self._weighted_by_local_shifts(exponentials, tile, sides)
        else:
            factors = [side.exponential_weights.to(self.driver.dtype).unsqueeze(dim) for side, dim in sides]
            factor = torch.add(*factors, out=self.driver.scratch(tile)) if len(factors) == 2 else factors[0]
            is_last = not (whole or uniform or entries.slope is not None)
            out = self.driver.gradient(tile) if is_last else self.driver.buffer(tile)
            grad = torch.mul(exponentials, factor, out=out)
        if candidate is not None:
            for weight in uniform:
                grad.add_(torch.where(candidate, weight.to(grad.dtype), 0.0))
        if positives is None or pair_grad is None:
            return grad, entries.slope, None
        if self.selection.pairs.positive.few:
            return grad, entries.slope, (positives, pair_grad)
        grad[positives] = pair_grad.to(grad.dtype)
        return grad, entries.slope, None

    def _pair_gradient(self, entries: Tensor, positives: Index, sides: list[tuple[Weights, int]]) -> Tensor:
        """Return dS of positive pairs, summed in float64; `entries` are E, or S if each row and column has a shift."""
        pair_entries = entries[positives].to(self._wide)
        total = torch.zeros_like(pair_entries)
        for side, dim in sides:
            index = positives[1 - dim]
            if side.target_weights is not None:
                total += side.target_weights[index]
            if self.selection.over == "negatives":
                continue
            exponentials = (pair_entries - side.shift[index]).exp() if isinstance(side.shift, Tensor) else pair_entries
            total += exponentials * side.exponential_weights[index]
            if side.logit_weights is not None:
                total += side.logit_weights[index]
        return total

    def _weighted_by_local_shifts(self, logits: Tensor, tile: Tile, sides: list[tuple[Weights, int]]) -> Tensor:
        """Return E times its factors if each row and column has its own shift, with an exponential for each side."""
        (side, dim), *rest = sides
        grad = self._exp(logits, side.shift, tile, dim).mul_(side.exponential_weights.to(logits.dtype).unsqueeze(dim))
        for side, dim in rest:
            assert isinstance(side.shift, Tensor)
            exponentials = logits.sub_(side.shift.to(logits.dtype).unsqueeze(dim)).exp_()
            grad.addcmul_(exponentials, side.exponential_weights.to(logits.dtype).unsqueeze(dim))
        return grad

    def _exp(self, logits: Tensor, shift: Tensor | float, tile: Tile, dim: int) -> Tensor:
        """Return exp(S - shift) with the shift of each row (dim 1) or column (dim 0), in the scratch tile."""
        assert isinstance(shift, Tensor)
        return torch.sub(logits, shift.to(logits.dtype).unsqueeze(dim), out=self.driver.scratch(tile)).exp_()


@dataclass(frozen=True)
class _Entries:
    """The candidates of a tile."""

    logits: Tensor  # -inf for entries that are no candidates; or the kept exponentials
    positives: Index | None  # their index
    values: Tensor | None = None  # the positives' logits, candidates or not
    slope: Tensor | None = None  # of the transform


def _sides(tile: Tile, block: Block, rows: _T | None, cols: _T | None) -> Iterator[tuple[_T, slice, int]]:
    """Yield (side, the tile's place in it, dim to sum over) for rows, and for columns unless they mirror the rows."""
    if rows is not None:
        yield rows, tile.rows, 1
    if cols is not None and not tile.self_transposed:
        yield cols, relative(tile.cols, block), 0


def _keep_largest_of_group_(logits: Tensor, group_size: int) -> None:
    """Set all but the largest logit of each group of `group_size` rows to -inf, in place, for each column."""
    groups = logits.view(-1, group_size, logits.shape[1])
    others = torch.ones_like(groups, dtype=torch.bool).scatter_(1, groups.argmax(1, keepdim=True), False)
    groups.masked_fill_(others, float("-inf"))


def _exp_(logits: Tensor, shift: float) -> Tensor:
    return (logits.sub_(shift) if shift else logits).exp_()
