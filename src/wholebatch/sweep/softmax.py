"""The softmax sweep: tiles of S to numbers of each row and column, and tiles of dS to dX and dY.

A pass over S collects, for each row i and likewise for each column j, sums over some of its entries:

    sum        R_i = sum_j exp(S_ij - c)      over the candidates, with a shift c (see `logsumexp`)
    target     T_i = sum_j S_ij               over the positives
    logits     M_i = sum_j S_ij               over the candidates
    count      how many                       of the candidates
    largest    max_j S_ij                     over the candidates but for positives (if there are other candidates)
    negatives  sum_j exp(S_ij - c)            over the same
    squares    sum_j exp(2 (S_ij - c))        over the same

and a loss is any differentiable function of A_i = c + log R_i, T_i and M_i. With its derivatives a_i, t_i, m_i by
those of the rows, and a'_j, t'_j, m'_j by those of the columns,

    dS_ij = E_ij (a_i / R_i + a'_j / C_j)     of candidates, E = exp(S - c)
          + m_i + m'_j                        of candidates
          + t_i + t'_j                        of positives

Under one shift for all, E serves rows and columns: forward 1 unit of multiply-adds and one exponential per entry,
backward 3 and one; 2 and none where E was kept.

The candidates are the negatives, or positives and negatives, or the positives. Where a row has one positive, its
cross-entropy is softplus(A_i - T_i) over the negatives: no difference of numbers near 1 is left in dS, and where
training has gone well, loss and gradient vanish as they should. Where positives are among the candidates, the two
terms of their dS are added in float64, inside the tile.

A symmetric S (features against themselves) needs the tiles on and above the diagonal only: a tile's column sums are
the mirrored tile's row sums, and dS + dS^T has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from .._precision import wide_dtype
from ..partition import Tile
from .driver import Block, Driver, relative
from .memory import KeptTiles
from .pairs import Index, Pairs

_T = TypeVar("_T")
Over = Literal["negatives", "all", "positives"]


class LogitTransform(Protocol):
    """A function of the logits that takes their place, entry by entry; `cols` says which columns these are."""

    def transform_(self, logits: Tensor, cols: slice, /) -> Tensor:
        """S to f(S), in place."""
        ...

    def slope_(self, logits: Tensor, cols: slice, /) -> Tensor:
        """S to what stands for f'(S), in place."""
        ...


@dataclass(frozen=True)
class Selection:
    """Which entries a pass sums over.

    Args:
        pairs: what is positive, what is excluded.
        over: the candidates.
        floor, ceiling: (b,), a row's candidates have logits above the one and up to the other.
        guide: (b, g), features of another model; ceiling then holds for x_guide . y_guide, and Y's rows carry theirs
            behind their own.
        bend: takes the place of the logits.
        offsets: (b,), added to a row's logits, bent or not.
        best_of: rows come in groups of so many, and of a group a column's one candidate is that with the largest logit.
    """

    pairs: Pairs
    over: Over = "negatives"
    floor: Tensor | None = None
    ceiling: Tensor | None = None
    guide: Tensor | None = None
    transform: LogitTransform | None = None
    offsets: Tensor | None = None
    best_of: int = 1


@dataclass(frozen=True)
class Sums:
    """Where the numbers of rows or of columns are added up."""

    shift: Tensor | float  # one for all, or (n,)
    fields: Mapping[str, Tensor]  # each (n,)

    def __getitem__(self, at: slice) -> Sums:
        return Sums(_at(self.shift, at), {name: field[at] for name, field in self.fields.items()})


@dataclass(frozen=True)
class Weights:
    """A loss's derivatives by the numbers of rows or of columns."""

    shift: Tensor | float
    of_exponentials: Tensor  # a_i / R_i
    of_targets: Tensor | None  # t_i
    of_logits: Tensor | None  # m_i

    def __getitem__(self, at: slice) -> Weights:
        targets, logits = (None if of is None else of[at] for of in (self.of_targets, self.of_logits))
        return Weights(_at(self.shift, at), self.of_exponentials[at], targets, logits)

    def named(self) -> dict[str, Tensor]:
        """Those that there are, by the fields of :class:`Sums` that they are derivatives by."""
        parts = {"sum": self.of_exponentials, "target": self.of_targets, "logits": self.of_logits}
        return {name: part for name, part in parts.items() if part is not None}

    def stacked(self) -> Tensor:
        """What there is of them, (k, n), to travel with the columns."""
        parts = (self.of_exponentials, self.of_targets, self.of_logits, self.shift)
        return torch.stack([part.to(self.of_exponentials) for part in parts if isinstance(part, Tensor)])

    def unstacked(self, rows: Tensor) -> Weights:
        """The same kinds of numbers, from `stacked` ones of other columns."""
        remaining = iter(rows)
        parts = (self.of_exponentials, self.of_targets, self.of_logits, self.shift)
        found = [next(remaining) if isinstance(part, Tensor) else part for part in parts]
        exponentials, targets, logits, shift = found
        assert isinstance(exponentials, Tensor)
        assert not isinstance(targets, float)
        assert not isinstance(logits, float)
        assert shift is not None
        return Weights(shift, exponentials, targets, logits)


class SoftmaxSweep:
    """Passes over the blocks of S, in the same order each time.

    Args:
        driver: of the rows.
        selection: what is summed over.
        kept: memory for E, written by `sums` and read by `gradients`; None: E is computed again.
    """

    def __init__(self, driver: Driver, selection: Selection, *, kept: KeptTiles | None = None) -> None:
        self.driver, self.selection, self.kept = driver, selection, kept
        self._device, self._wide = driver.x.device, wide_dtype(driver.x.device)

    def maxima(self, block: Block, rows: Tensor | None, cols: Tensor | None) -> None:
        """Raise `rows` (b,) and `cols` (n,) to the largest logits of the block's candidates; None is left out."""
        for tile, x, y in self.driver.tiles(block):
            logits = self._candidates(tile, block, x, y).logits
            for largest, at, dim in _sides(tile, block, rows, cols):
                largest[at] = torch.maximum(largest[at], logits.amax(dim))

    def sums(self, block: Block, rows: Sums | None, cols: Sums | None) -> None:
        """Add the block's part to the fields of `rows` and `cols`; None is left out."""
        shift = one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            sides = [(side[at], dim) for side, at, dim in _sides(tile, block, rows, cols)]
            entries = self._candidates(tile, block, x, y)
            for side, dim in sides:
                self._sum_logits(entries, side.fields, dim)
            if shift is None:
                for side, dim in sides:
                    self._sum_exponentials(self._exp(entries.logits, side.shift, tile, dim), entries.at, [(side, dim)])
                continue
            exponentials = _exp_(entries.logits, shift)
            if self.kept is not None:
                self.kept.keep(exponentials)
            self._sum_exponentials(exponentials, entries.at, sides)

    def gradients(
        self,
        block: Block,
        rows: Weights | None,
        cols: Weights | None,
        u: Tensor | None,
        v: Tensor | None,
        of_offsets: Tensor | None = None,
    ) -> None:
        """Add dS Y to `u` (b, d), dS^T X to `v` (n, d) and dS 1 to `of_offsets` (b,); None is left out."""
        shift = one_shift(rows, cols)
        for tile, x, y in self.driver.tiles(block):
            sides = [] if rows is None else [(rows[tile.rows], 1)]
            if cols is not None:  # of a tile that is its own mirror image, too: its gradient is dS + dS^T
                sides.append((cols[relative(tile.cols, block)], 0))
            grad, slope = self._gradient(tile, block, x, y, sides, shift)
            if of_offsets is not None:
                of_offsets[tile.rows] += grad.sum(1)
            if slope is not None:
                grad.mul_(slope)
            self.driver.products(grad, tile, x, y, block, u, v)

    # A tile of S: what is candidate in it, and what its rows or columns (`dim` is summed over) have of it.

    def _candidates(self, tile: Tile, block: Block, x: Tensor, y: Tensor, *, slope: bool = False) -> _Entries:
        """The tile of S, -inf where there is no candidate; if asked for, with the slope of the bend that it has."""
        selection, logits = self.selection, self.driver.logits(tile, x, y)
        at = selection.pairs.positive.within(tile, self._device)
        if selection.best_of > 1:
            _keep_the_best_(logits, selection.best_of)
        steepness = None
        if selection.transform is not None:
            if slope:
                steepness = selection.transform.slope_(self.driver.spare(tile).copy_(logits), tile.cols)
            selection.transform.transform_(logits, tile.cols)
        if selection.offsets is not None:
            logits.add_(selection.offsets[tile.rows, None])
        values = None if at is None else logits[at]
        candidates = values
        if selection.ceiling is not None:
            compared = logits if selection.guide is None else self._guide(selection.guide, tile, block)
            logits.masked_fill_(compared > selection.ceiling[tile.rows, None], float("-inf"))
        if selection.floor is not None:
            logits.masked_fill_(logits <= selection.floor[tile.rows, None], float("-inf"))
            if at is not None:
                candidates = logits[at]
        excluded = selection.pairs.excluded.within(tile, self._device)
        if excluded is not None:
            logits[excluded] = float("-inf")
        if selection.over == "positives":
            logits.fill_(float("-inf"))
        if at is not None and candidates is not None:
            logits[at] = float("-inf") if selection.over == "negatives" else candidates
        return _Entries(logits, at, values, steepness)

    def _guide(self, guide: Tensor, tile: Tile, block: Block) -> Tensor:
        """The guide's similarities, in the scratch tile; its features of the columns lie behind Y's."""
        theirs = block.y[relative(tile.cols, block), self.driver.width :].to(self.driver.dtype)
        return torch.mm(guide[tile.rows], theirs.T, out=self.driver.scratch(tile))

    def _sum_logits(self, entries: _Entries, fields: Mapping[str, Tensor], dim: int) -> None:
        """Fields that are sums or maxima of the logits themselves."""
        logits, at, values = entries.logits, entries.at, entries.values
        if "target" in fields and at is not None and values is not None:
            fields["target"].index_add_(0, at[1 - dim], values.to(self._wide))
        if "logits" in fields:
            candidate = logits > float("-inf")
            fields["count"].add_(candidate.sum(dim))
            fields["logits"].add_(torch.where(candidate, logits, 0.0).sum(dim))
        if "largest" in fields:
            among_others = self.selection.over == "all" and at is not None
            if among_others:
                kept, logits[at] = logits[at], float("-inf")
            fields["largest"].copy_(torch.maximum(fields["largest"], logits.amax(dim)))
            if among_others:
                logits[at] = kept

    def _sum_exponentials(self, exponentials: Tensor, at: Index | None, sides: list[tuple[Sums, int]]) -> None:
        """Fields that are sums of exponentials, which are overwritten if their squares are wanted."""
        for side, dim in sides:
            side.fields["sum"].add_(exponentials.sum(dim))
        if not any("squares" in side.fields for side, _ in sides):
            return
        if at is not None and self.selection.over == "all":
            exponentials[at] = 0.0
        for side, dim in sides:
            side.fields["negatives"].add_(exponentials.sum(dim))
        squares = exponentials.to(self._wide).square_()  # of numbers that may be as large as float32 allows
        for side, dim in sides:
            side.fields["squares"].add_(squares.sum(dim))

    # A tile of dS, from its rows' and its columns' weights.

    def _gradient(
        self, tile: Tile, block: Block, x: Tensor, y: Tensor, sides: list[tuple[Weights, int]], shift: float | None
    ) -> tuple[Tensor, Tensor | None]:
        """By the logits after the bend, and the bend's slope."""
        kept = None if self.kept is None else self.kept.next(tile.shape)
        if kept is None:
            entries = self._candidates(tile, block, x, y, slope=True)
        else:
            at = self.selection.pairs.positive.within(tile, self._device)
            entries = _Entries(kept, at)
        at, exponentials = entries.at, entries.logits
        uniform = [side.of_logits.unsqueeze(dim) for side, dim in sides if side.of_logits is not None]
        candidate = exponentials > float("-inf") if uniform else None
        if kept is None and shift is not None:
            _exp_(exponentials, shift)
        elif kept is not None and kept.dtype != self.driver.dtype:
            exponentials = self.driver.buffer(tile).copy_(kept)
        of_pairs = None if at is None else self._gradient_of_pairs(exponentials, at, sides)

        if shift is None:
            grad = self._weighted_by_own_shifts(exponentials, tile, sides)
        else:
            factors = [side.of_exponentials.to(self.driver.dtype).unsqueeze(dim) for side, dim in sides]
            factor = torch.add(*factors, out=self.driver.scratch(tile)) if len(factors) == 2 else factors[0]
            grad = torch.mul(exponentials, factor, out=self.driver.buffer(tile))
        if candidate is not None:
            for of_side in uniform:
                grad.add_(torch.where(candidate, of_side.to(grad.dtype), 0.0))
        if at is not None and of_pairs is not None:
            grad[at] = of_pairs.to(grad.dtype)
        return grad, entries.slope

    def _gradient_of_pairs(self, entries: Tensor, at: Index, sides: list[tuple[Weights, int]]) -> Tensor:
        """dS of positive pairs, summed in float64; `entries` are E, or with a shift for each row and column S."""
        of_entries = entries[at].to(self._wide)
        total = torch.zeros_like(of_entries)
        for side, dim in sides:
            here = at[1 - dim]
            if side.of_targets is not None:
                total += side.of_targets[here]
            if self.selection.over == "negatives":
                continue
            exponentials = (of_entries - side.shift[here]).exp() if isinstance(side.shift, Tensor) else of_entries
            total += exponentials * side.of_exponentials[here]
            if side.of_logits is not None:
                total += side.of_logits[here]
        return total

    def _weighted_by_own_shifts(self, logits: Tensor, tile: Tile, sides: list[tuple[Weights, int]]) -> Tensor:
        """E times its factors where each row and column has a shift of its own: an exponential for each."""
        (side, dim), *rest = sides
        grad = self._exp(logits, side.shift, tile, dim).mul_(side.of_exponentials.to(logits.dtype).unsqueeze(dim))
        for side, dim in rest:
            assert isinstance(side.shift, Tensor)
            exponentials = logits.sub_(side.shift.to(logits.dtype).unsqueeze(dim)).exp_()
            grad.addcmul_(exponentials, side.of_exponentials.to(logits.dtype).unsqueeze(dim))
        return grad

    def _exp(self, logits: Tensor, shift: Tensor | float, tile: Tile, dim: int) -> Tensor:
        """exp(S - shift) relative to the shift of each row (dim 1) or column (dim 0), in the scratch tile."""
        assert isinstance(shift, Tensor)
        return torch.sub(logits, shift.to(logits.dtype).unsqueeze(dim), out=self.driver.scratch(tile)).exp_()


@dataclass(frozen=True)
class _Entries:
    """A tile's candidates."""

    logits: Tensor  # -inf elsewhere; or, if they were kept, the exponentials
    at: Index | None  # where the positives are
    values: Tensor | None = None  # the positives' logits, candidates or not
    slope: Tensor | None = None  # of the bend


def _sides(tile: Tile, block: Block, rows: _T | None, cols: _T | None) -> Iterator[tuple[_T, slice, int]]:
    """What the tile says about its rows, and its columns unless they only mirror the rows; and what to sum over."""
    if rows is not None:
        yield rows, tile.rows, 1
    if cols is not None and not tile.own_mirror:
        yield cols, relative(tile.cols, block), 0


def one_shift(rows: Sums | Weights | None, cols: Sums | Weights | None) -> float | None:
    """The shift that all pairs share; None if each has its own."""
    side = rows if rows is not None else cols
    assert side is not None
    return None if isinstance(side.shift, Tensor) else side.shift


def _at(shift: Tensor | float, at: slice) -> Tensor | float:
    return shift[at] if isinstance(shift, Tensor) else shift


def _keep_the_best_(logits: Tensor, of: int) -> None:
    """-inf in the place of all but the largest of each `of` rows, in place."""
    groups = logits.view(-1, of, logits.shape[1])
    others = torch.ones_like(groups, dtype=torch.bool).scatter_(1, groups.argmax(1, keepdim=True), False)
    groups.masked_fill_(others, float("-inf"))


def _exp_(logits: Tensor, shift: float) -> Tensor:
    return (logits.sub_(shift) if shift else logits).exp_()
