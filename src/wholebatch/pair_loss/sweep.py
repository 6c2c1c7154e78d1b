"""The sweep of a declared loss: tiles of similarities, forward into the kept numbers, backward into gradients.

    forward    per tile: s by matrix products, each term's mask and scores, and what they add to rows and columns
    backward   the same scores again, with the graph of one tile; autograd takes dL/df back to s, data and parameters

    dL/df_ij = (weight of f_ij in row i) + (weight of f_ij in column j)        one pass through the graph for both

A tile in which the masks of all terms leave no entry is skipped before its products are computed, on a CPU, where
looking at a mask costs little. Work: 1 unit of multiply-adds forward, 3 backward, and the functions of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..partition import Tile, tiles
from ..sweep import Block, Driver, Factor
from .affine import Coefficients, coefficients, confirmed, is_affine, may_be_affine
from .entries import Entries, Values
from .fields import nested
from .reductions import Term
from .running import Rule
from .similarity import ONE, of_tile


@dataclass(frozen=True)
class Reduced:
    """A term that tiles compute, and its rule.

    Args:
        name: of the term.
        term: what the user declared.
        rule: how it is computed.
        rows: whether rows are reduced.
        cols: whether columns are reduced.
    """

    name: str
    term: Term
    rule: Rule
    rows: bool
    cols: bool


@dataclass(frozen=True)
class Side:
    """Numbers of the rows, or of all columns, by name; names with a dot belong to one of several similarities.

    Args:
        numbers: (rows,) each.
        offset: index of the first row among all ranks'.
        device: of the numbers.
        learned: the names of those with a gradient.
    """

    numbers: Mapping[str, Tensor]
    offset: int
    device: torch.device
    learned: Sequence[str] = ()

    def at(self, rows: slice, dim: int) -> dict[str, Any]:
        """Return the numbers of some rows as (m, 1), dim 1, or of some columns as (1, n), dim 0."""
        return {name: x[rows].unsqueeze(dim) for name, x in self.numbers.items()}


class Gradients(NamedTuple):
    """The sums of a backward pass: dL/dX, dL/d(numbers of rows) and dL/d(parameters); None where nobody asks."""

    u: Tensor | None
    of_rows: Tensor
    of_parameters: list[Tensor]


@dataclass
class PairSweep:
    """Go over the blocks of the matrix of pairs.

    Args:
        kinds: of similarities, by name.
        drivers: of the products, by the same names; each row of Y carries the features of one after the other.
        reduced: the terms.
        x, y: the numbers of rows and columns.
        parameters: by name.
        learned: the names of parameters with a gradient.
        symmetric: whether a tile above the diagonal stands for its mirror image, too: its columns are rows there. A
            tile on the diagonal is its own mirror image, and holds all of its entries.
    """

    kinds: Mapping[str, str]
    drivers: Mapping[str, Driver]
    reduced: Sequence[Reduced]
    x: Side
    y: Side
    parameters: Mapping[str, Tensor | float]
    learned: Sequence[str]
    symmetric: bool = False
    _in_dtype: dict[str, Any] = field(default_factory=dict)
    _affine: list[int] | None = None

    def forward(
        self, block: Block, rows: Tensor, cols: Tensor | None, slices: tuple[Sequence[slice], Sequence[slice]]
    ) -> None:
        """Add a block to the kept numbers of rows, (b, numbers), and of its columns, (n, numbers)."""
        for tile, factors, masks in self._tiles(block):
            here = _relative(tile.cols, block)
            products = {name: self.drivers[name].logits(tile, *factors[name]) for name in factors}
            entries = self._entries(products, self._numbers(tile), self._parameters())
            of_rows, of_cols = map(iter, slices)
            affine = self._affine_terms(entries)
            for at, (reduced, mask) in enumerate(zip(self.reduced, masks, strict=True)):
                candidates, room = _mask(entries, reduced.term, mask), self._room(tile, 0)
                found = affine.get(at)
                if found is not None:
                    values = Values(tile.shape, candidates, found.score_(products[ONE], self._room(tile, 1)), room=room)
                else:
                    values = replace(entries.values(reduced.term, candidates, safe=False), room=room)
                if reduced.rows:
                    reduced.rule.update_(rows[tile.rows, next(of_rows)], values, 1, tile.cols.start)
                if reduced.cols:
                    numbers = next(of_cols)
                    if not tile.self_transposed:
                        assert cols is not None
                        first = self.x.offset + tile.rows.start
                        reduced.rule.update_(cols[here, numbers], values, 0, first)

    def backward(
        self, block: Block, rows: Sequence[Tensor], cols: Sequence[Tensor], into: Gradients, v: Tensor | None
    ) -> None:
        """Add a block's part of the gradients.

        Args:
            block: of columns.
            rows: the numbers that each term's rule needs of rows, (constants, b), empty for terms without.
            cols: of the block's columns, (constants, n).
            into: the sums that this rank keeps.
            v: (n, d + k), dL/dY and dL/d(learned numbers of columns); None: nobody asks.
        """
        wants = v is not None or into.u is not None
        masked = any(reduced.term.where is not None for reduced in self.reduced)
        looks = masked and self.x.device.type == "cpu"  # a GPU would wait
        for tile, factors, masks in self._tiles(block):
            here = _relative(tile.cols, block)
            products = {name: self.drivers[name].logits(tile, *factors[name]) for name in factors}
            of_rows = [numbers[:, tile.rows] for numbers in rows]
            of_cols = [None if tile.self_transposed else numbers[:, here] for numbers in cols]
            leaves = self._leaves(tile, products, wants=wants)
            found = self._gradients(tile, leaves, masks, of_rows, of_cols, safe=masked and not looks)
            if looks and not all(bool(grad.sum().isfinite()) for grad in found.values()):
                found = self._gradients(tile, leaves, masks, of_rows, of_cols, safe=True)
            self._add(tile, block, factors, leaves, found, into, v)

    def _gradients(
        self,
        tile: Tile,
        leaves: _Leaves,
        masks: Sequence[Tensor | None],
        rows: Sequence[Tensor],
        cols: Sequence[Tensor | None],
        *,
        safe: bool,
    ) -> dict[int, Tensor]:
        """Return the gradients of a tile's leaves, by their ids.

        With `safe=False` entries that are no candidates reach the scores as they are. Their weight is 0, and spoils a
        sum only if a slope there is infinite or NaN; then the sum is NaN.
        """
        outputs, weights = list[Tensor](), list[Tensor]()
        of_products: Tensor | None = None  # from affine scores
        with torch.enable_grad():
            entries = self._entries(leaves.products, (leaves.x, leaves.y), leaves.parameters)
            affine = {} if safe else self._affine_terms(entries)
            for at, (reduced, mask, of_rows, of_cols) in enumerate(zip(self.reduced, masks, rows, cols, strict=True)):
                if not reduced.rule.constants:
                    continue
                sides = [(of_rows, 1)] if reduced.rows else []
                if reduced.cols and of_cols is not None:
                    sides.append((of_cols, 0))
                candidates, found = _mask(entries, reduced.term, mask), affine.get(at)
                if found is None:
                    _collect(reduced.rule, entries.values(reduced.term, candidates, safe=safe), sides, outputs, weights)
                    continue
                score = found.score_(leaves.products[ONE].detach(), self._room(tile, 1))
                total = self._weights_of(reduced.rule, tile, candidates, score, sides)
                for output, weight in found.outputs(score, total):
                    outputs.append(output)
                    weights.append(weight)
                slope = found.a.detach().to(score.dtype)
                if of_products is None:
                    of_products = torch.mul(total, slope, out=self._room(tile, 3))
                else:
                    of_products.addcmul_(total, slope)
        grads = leaves.gradients(outputs, weights)
        products = leaves.products.get(ONE)
        if of_products is not None and products is not None and products.requires_grad:
            beside = grads.get(id(products))
            grads[id(products)] = of_products if beside is None else of_products.add_(beside)
        return grads

    @torch.no_grad()
    def _weights_of(
        self, rule: Rule, tile: Tile, mask: Tensor | None, score: Tensor, sides: Sequence[tuple[Tensor, int]]
    ) -> Tensor:
        """Return dL/df of a tile for a term whose scores are known, in memory that the next term overwrites."""
        found = []
        for number, (numbers, dim) in enumerate(sides):
            values = Values(tile.shape, mask, score, room=self._room(tile, 2 * number))
            weights, _ = rule.weights(values, [x.to(score.dtype).unsqueeze(dim) for x in numbers])
            assert weights is not None
            found.append(weights)
        return found[0] if len(found) == 1 else torch.add(found[0], found[1], out=self._room(tile, 0))

    def _affine_terms(self, entries: Entries) -> dict[int, Coefficients]:
        """Return the coefficients of affine scores on a tile, by the numbers of their terms."""
        if self.x.device.type != "cpu":
            return {}  # the host would have to look at the coefficients
        if self._affine is None:
            few = entries.first()
            self._affine = [
                at
                for at, of in enumerate(self.reduced)
                if may_be_affine(of.term, self.kinds) and is_affine(of.term, few) and confirmed(of.term, few)
            ]
        found = {at: coefficients(self.reduced[at].term, entries) for at in self._affine}
        return {at: of for at, of in found.items() if of is not None}

    def _room(self, tile: Tile, number: int) -> Tensor:
        """Return memory for a tile, by its number: what was in it is lost at the next tile, and at the next use."""
        return next(iter(self.drivers.values())).spare(tile, number)

    def _tiles(self, block: Block) -> Iterator[tuple[Tile, dict[str, tuple[Factor, Factor]], list[Tensor | None]]]:
        """Yield the tiles, their factors for each similarity, and the masks that do not need similarities."""
        driver = next(iter(self.drivers.values()))
        for tile in tiles(block.rows, block.cols, driver.side, triangle=block.triangle):
            masks = self._masks(tile)
            if masks is None:
                continue
            factors, start = {}, 0
            for name, each in self.drivers.items():
                y = block.y[_relative(tile.cols, block), start : start + each.width]
                factors[name] = each.factor("x", each.rows(tile.rows)), each.factor("y", y)
                start += each.width
            yield tile, factors, masks

    def _masks(self, tile: Tile) -> list[Tensor | None] | None:
        """Return the masks of terms that read no similarity, None for others; None if no term has an entry here."""
        early = [reduced.term for reduced in self.reduced]
        if not any(term.where is not None and not term.mask_reads_similarity for term in early):
            return [None] * len(early)
        shape = torch.empty(tile.shape, device="meta")
        x, y = (nested(numbers)[0] for numbers in self._numbers(tile))
        entries = Entries(self.kinds, dict.fromkeys(self.kinds, shape), x, y, {})
        known: dict[int, Tensor | None] = {}  # terms may share a mask
        for term in early:
            if id(term.where) not in known:
                known[id(term.where)] = None if term.mask_reads_similarity else entries.mask(term)
        masks = [known[id(term.where)] for term in early]
        if self.x.device.type == "cpu" and all(mask is not None and _is_empty(mask) for mask in known.values()):
            return None
        return masks

    def _numbers(self, tile: Tile) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.x.at(tile.rows, 1), self.y.at(tile.cols, 0)

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters in the precision of tiles: one of float64 would widen all of them."""
        if not self._in_dtype:
            dtype = next(iter(self.drivers.values())).dtype
            for name, value in self.parameters.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value = value.detach().to(dtype)
                self._in_dtype[name] = value
        return dict(self._in_dtype)

    def _leaves(self, tile: Tile, products: Mapping[str, Tensor], *, wants: bool) -> _Leaves:
        """Return products, numbers and parameters as leaves of the tile's graph."""
        x, y = self._numbers(tile)
        for of_side, names in ((x, self.x.learned), (y, self.y.learned)):
            for name in names:
                of_side[name] = of_side[name].detach().requires_grad_()
        parameters = self._parameters()
        parameters |= {name: parameters[name].detach().requires_grad_() for name in self.learned}
        return _Leaves({name: s.detach().requires_grad_(wants) for name, s in products.items()}, x, y, parameters)

    def _entries(
        self,
        products: Mapping[str, Tensor],
        numbers: tuple[Mapping[str, Any], Mapping[str, Any]],
        parameters: Mapping[str, Any],
    ) -> Entries:
        (x, x_squares), (y, y_squares) = map(nested, numbers)
        s = {
            name: of_tile(self.kinds[name], of, x_squares.get(name), y_squares.get(name))
            for name, of in products.items()
        }
        return Entries(self.kinds, s, x, y, parameters)

    def _add(
        self,
        tile: Tile,
        block: Block,
        factors: Mapping[str, tuple[Factor, Factor]],
        leaves: _Leaves,
        grads: Mapping[int, Tensor],
        into: Gradients,
        v: Tensor | None,
    ) -> None:
        """Add the gradients by a tile's leaves to the sums."""
        here, start = _relative(tile.cols, block), 0
        tile = Tile(tile.rows, tile.cols)  # on the diagonal as well, where it holds all of its entries
        for name, driver in self.drivers.items():
            columns = slice(start, start + driver.width)
            start = columns.stop
            grad = grads.get(id(leaves.products[name]))
            if grad is not None:
                u = None if into.u is None else into.u[:, columns]
                of_y = None if v is None else v[:, columns]
                driver.products(grad.contiguous(), tile, *factors[name], block, u, of_y)
        for number, name in enumerate(self.x.learned):
            grad = grads.get(id(leaves.x[name]))
            if grad is not None:
                into.of_rows[tile.rows, number] += grad[:, 0]
        for number, name in enumerate(self.y.learned):
            grad = grads.get(id(leaves.y[name]))
            if grad is not None and v is not None:
                v[here, start + number] += grad[0]
        for number, name in enumerate(self.learned):
            grad = grads.get(id(leaves.parameters[name]))
            if grad is not None:
                into.of_parameters[number] += grad


class _Leaves(NamedTuple):
    """Products, numbers of rows and of columns, and parameters, as leaves of a graph."""

    products: Mapping[str, Tensor]
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    parameters: Mapping[str, Any]

    def gradients(self, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return the gradients of all leaves that have one, by their ids."""
        every = [x for of in (self.products, self.x, self.y, self.parameters) for x in of.values()]
        asked = [x for x in every if isinstance(x, Tensor) and x.requires_grad]
        if not asked or not outputs:
            return {}
        found = torch.autograd.grad(outputs, asked, weights, allow_unused=True)
        return {id(x): grad for x, grad in zip(asked, found, strict=True) if grad is not None}


def _mask(entries: Entries, term: Term, known: Tensor | None) -> Tensor | None:
    """Return a term's candidates, which are known unless they depend on similarities."""
    return entries.mask(term) if term.mask_reads_similarity else known


def _collect(
    rule: Rule, values: Values, sides: Sequence[tuple[Tensor, int]], outputs: list[Tensor], weights: list[Tensor]
) -> None:
    """Append a term's outputs of a tile that have a gradient, and dL by them.

    Args:
        rule: of the term.
        values: of the tile.
        sides: the numbers that the rule needs of rows, (constants, m) and dimension 1, or of columns, and 0.
        outputs: the list of outputs.
        weights: the list of the gradients by them.
    """
    if not values.differentiable:
        return
    with torch.no_grad():
        parts = [rule.weights(values, [x.to(_dtype_of(values)).unsqueeze(dim) for x in of]) for of, dim in sides]
        for output, *of_sides in zip((values.value, values.log_weight), *parts, strict=True):
            if output is not None and output.requires_grad:
                total = of_sides[0] if len(of_sides) == 1 else of_sides[0] + of_sides[1]
                outputs.append(output)
                weights.append(total.expand(values.shape).sum_to_size(output.shape).to(output.dtype))


def _dtype_of(values: Values) -> torch.dtype:
    assert values.value is not None
    return values.value.dtype


def _is_empty(mask: Tensor) -> bool:
    """Return whether a mask leaves no entry; most masks show one in their first row."""
    return not (bool((mask[0] if mask.dim() else mask).any()) or bool(mask.any()))


def _relative(cols: slice, block: Block) -> slice:
    return slice(cols.start - block.cols.start, cols.stop - block.cols.start)
