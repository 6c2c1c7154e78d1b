"""The softmax sweep: tiles of S to row and column sums of exponentials, and tiles of dS to dX and dY.

With P = softmax over the row, Q = softmax over the column, and N the number of softmaxes in the loss,

    N dS_ij = P_ij + Q_ij - positive [i and j are a pair] - uniform

where a loss that uses one direction has one of P and Q. Under one shift c for all (see `logsumexp`), E = exp(S - c)
serves both:

    R_i = sum_j E_ij,   C_j = sum_i E_ij,      P_ij + Q_ij = E_ij (1 / R_i + 1 / C_j)

Forward 1 unit of multiply-adds and one exponential per entry, backward 3 and one; 2 and none where E was kept.

Positive pairs get more care, for where training has gone well P_ii + Q_ii is all but 2 and the loss all but 0. The
target is subtracted inside the tile, in float64, from E_ii / R_i + E_ii / C_i; the target's logit in the loss is
log E_ii + c, with the rounding that R_i has seen. Then a pair whose E_ii is all of R_i has loss and gradient 0, not
rounding. And a kept tile in bfloat16 gets its positives back as they were.

A symmetric S (features against themselves) needs the tiles on and above the diagonal only: a tile's column sums are
the mirrored tile's row sums, and dS + dS^T = E_ij (1 / R_i + 1 / R_j) - ... has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from .._precision import wide_dtype
from ..logsumexp import LogSumExp
from ..partition import Tile
from .driver import Block, Driver, relative
from .memory import KeptTiles
from .pairs import Pairs

_T = TypeVar("_T", Tensor, LogSumExp)


class SoftmaxSweep:
    """Passes over the blocks of S, in the same order each time.

    Args:
        driver: of the rows.
        pairs: which entries are positive, which excluded.
        kept: memory for E, written by `sums` and read by `gradients`; None: E is computed again.
        positives: for `gradients` with kept tiles, what `sums` left in `positives`.
        total: whether `sums` totals all logits in `total_logit`.
    """

    def __init__(
        self,
        driver: Driver,
        pairs: Pairs,
        *,
        kept: KeptTiles | None = None,
        positives: Sequence[Tensor] = (),
        total: bool = False,
    ) -> None:
        self.driver, self.pairs, self.kept, self._total = driver, pairs, kept, total
        self._device, self._wide = driver.x.device, wide_dtype(driver.x.device)
        self.positives = list(positives)  # E of the positive pairs of each tile with any
        self.target_logit: Tensor = torch.zeros((), dtype=self._wide, device=self._device)  # of all softmaxes
        self.total_logit = torch.zeros_like(self.target_logit)  # sum_ij S_ij

    def maxima(self, block: Block, row_max: Tensor | None, col_max: Tensor | None) -> None:
        """Raise `row_max` (b,) and `col_max` (n,) to the block's largest logits; None is left out."""
        for tile, x, y in self.driver.tiles(block):
            logits = self._logits(tile, x, y)
            for largest, dim in _sides(tile, block, row_max, col_max):
                torch.maximum(largest, logits.amax(dim), out=largest)

    def sums(self, block: Block, rows: LogSumExp | None, cols: LogSumExp | None) -> None:
        """Add the block's exponentials, relative to the shifts, to `rows.sum` (b,) and `cols.sum` (n,)."""
        if self._total:
            x_sum, y_sum = (z.sum(0, dtype=self._wide) for z in (self.driver.x[block.rows], block.y))
            self.total_logit += self.driver.scale * (x_sum * y_sum).sum()
        shift = _one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            sides = list(_sides(tile, block, rows, cols))
            if shift is None:
                self._sum_by_own_shifts(tile, x, y, sides)
            else:
                self._sum_by_one_shift(tile, x, y, sides, shift)

    def gradients(
        self,
        block: Block,
        rows: LogSumExp | None,
        cols: LogSumExp | None,
        *,
        positive: float,
        uniform: float,
        u: Tensor | None,
        v: Tensor | None,
    ) -> None:
        """Add N dS Y to `u` (b, d) and N dS^T X to `v` (n, d), from finished sums; None is left out."""
        shift = _one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            of_rows = None if rows is None else rows[tile.rows]
            of_cols = None if cols is None else cols[relative(tile.cols, block)]
            if shift is None:
                grad = self._grad_by_own_shifts(tile, x, y, of_rows, of_cols, positive)
            else:
                grad = self._grad_by_one_shift(tile, x, y, of_rows, of_cols, positive, shift)
            if uniform:
                grad.sub_(uniform)
            self.driver.products(grad, tile, x, y, block, u, v)

    # The tile functions: a tile to its part of the sums, a tile to N dS. First with one shift for all, E = exp(S - c).

    def _sum_by_one_shift(
        self, tile: Tile, x: Tensor, y: Tensor, sides: Sequence[tuple[LogSumExp, int]], shift: float
    ) -> None:
        logits = self._logits(tile, x, y)
        at = self.pairs.positives(tile, self._device)
        targets = None if at is None else logits[at].to(self._wide)
        exponentials = _exp_(logits, shift)
        if at is not None and targets is not None:
            of_pairs = exponentials[at]
            self.positives.append(of_pairs)
            self.target_logit += len(sides) * self._as_summed(of_pairs, shift, targets).sum()
        if self.kept is not None:
            self.kept.keep(exponentials)
        for side, dim in sides:
            side.sum.add_(exponentials.sum(dim))

    def _grad_by_one_shift(
        self,
        tile: Tile,
        x: Tensor,
        y: Tensor,
        rows: LogSumExp | None,
        cols: LogSumExp | None,
        positive: float,
        shift: float,
    ) -> Tensor:
        at = self.pairs.positives(tile, self._device)
        kept = None if self.kept is None else self.kept.next(tile.shape)
        if kept is None:
            exponentials = _exp_(self._logits(tile, x, y), shift)
            of_pairs = None if at is None else exponentials[at]
        else:
            exponentials = kept if kept.dtype == self.driver.dtype else self.driver.buffer(tile).copy_(kept)
            of_pairs = None if at is None else self.positives.pop(0)
        sums = [side.sum.unsqueeze(dim) for side, dim in ((rows, 1), (cols, 0)) if side is not None]
        if len(sums) == 1:
            factor = sums[0].reciprocal()
        else:
            factor = torch.add(*(total.reciprocal() for total in sums), out=self.driver.scratch(tile))
        grad = torch.mul(exponentials, factor, out=self.driver.buffer(tile))
        if at is not None and of_pairs is not None:
            wide = of_pairs.to(self._wide)
            softmaxes = [wide / total.expand(tile.shape)[at].to(self._wide) for total in sums]
            grad[at] = (torch.stack(softmaxes).sum(0) - positive).to(grad.dtype)
        return grad

    # The same with a shift for each row and column: two exponentials per entry.

    def _sum_by_own_shifts(self, tile: Tile, x: Tensor, y: Tensor, sides: Sequence[tuple[LogSumExp, int]]) -> None:
        logits = self._logits(tile, x, y)
        at = self.pairs.positives(tile, self._device)
        if at is not None:
            self.target_logit += len(sides) * logits[at].sum(dtype=self._wide)
        for side, dim in sides:
            side.sum.add_(self._exp(logits, side, tile, dim).sum(dim))

    def _grad_by_own_shifts(
        self, tile: Tile, x: Tensor, y: Tensor, rows: LogSumExp | None, cols: LogSumExp | None, positive: float
    ) -> Tensor:
        logits = self._logits(tile, x, y)
        p = None if rows is None else self._exp(logits, rows, tile, dim=1).div_(rows.sum.unsqueeze(1))
        q = None if cols is None else logits.sub_(cols.shift).exp_().div_(cols.sum)
        grad = q if p is None else p if q is None else q.add_(p)
        assert grad is not None
        at = self.pairs.positives(tile, self._device)
        if at is not None:
            grad[at] -= positive
        return grad

    def _logits(self, tile: Tile, x: Tensor, y: Tensor) -> Tensor:
        logits = self.driver.logits(tile, x, y)
        at = self.pairs.excluded(tile, self._device)
        if at is not None:
            logits[at] = float("-inf")
        return logits

    def _exp(self, logits: Tensor, side: LogSumExp, tile: Tile, dim: int) -> Tensor:
        """exp(S - shift) relative to the shift of each row (dim 1) or column (dim 0), in the scratch tile."""
        assert isinstance(side.shift, Tensor)
        return torch.sub(logits, side.shift.unsqueeze(dim), out=self.driver.scratch(tile)).exp_()

    def _as_summed(self, exponentials: Tensor, shift: float, logits: Tensor) -> Tensor:
        """The logits as their exponentials have it: log E + c; as they are where E may have lost more than rounding."""
        safe = exponentials >= torch.finfo(exponentials.dtype).tiny / torch.finfo(exponentials.dtype).eps
        return torch.where(safe, exponentials.to(self._wide).log() + shift, logits)


def _sides(tile: Tile, block: Block, rows: _T | None, cols: _T | None) -> Iterator[tuple[_T, int]]:
    """What belongs to the tile's rows, and to its columns unless they only mirror the rows; and what to sum over."""
    if rows is not None:
        yield rows[tile.rows], 1
    if cols is not None and not tile.own_mirror:
        yield cols[relative(tile.cols, block)], 0


def _one_shift(rows: LogSumExp | None, cols: LogSumExp | None) -> float | None:
    """The shift that all pairs share; None if each has its own."""
    side = rows if rows is not None else cols
    assert side is not None
    return None if isinstance(side.shift, Tensor) else side.shift


def _exp_(logits: Tensor, shift: float) -> Tensor:
    return (logits.sub_(shift) if shift else logits).exp_()
