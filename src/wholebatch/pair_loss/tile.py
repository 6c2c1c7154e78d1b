"""One tile: the numbers that it is computed from, what it adds to the kept numbers, and its gradients.

`PlainTiles` calls the user's functions on the tile, and autograd for their derivative. The functions of this file also
run while a tile is traced for the compiler, see `compiled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..partition import Tile
from .accumulators import Rule
from .affine import Coefficients, are_constant, by_factor, coefficients, confirmed, is_affine, may_be_affine
from .reductions import Term
from .row_data import nested
from .similarity import DISTANCE, ONE, tile_similarities
from .tile_entries import Entries, Values, with_ties

Slot = tuple[str, str]  # "s", "x", "y" or "p", and a name
Affine = dict[int, bool | Coefficients]


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


class Leaves(NamedTuple):
    """Everything that a tile is computed from: products, numbers of rows and of columns, and parameters.

    Tensors that require a gradient are the leaves of the tile's graph. x are (m, 1), y (1, n).
    """

    kinds: Mapping[str, str]
    products: Mapping[str, Tensor]
    x: Mapping[str, Any]
    y: Mapping[str, Any]
    parameters: Mapping[str, Any]

    def slots(self) -> Iterator[tuple[Slot, Any]]:
        """Yield all values with their places, in the same order for all tiles."""
        for letter, numbers in (("s", self.products), ("x", self.x), ("y", self.y), ("p", self.parameters)):
            for name, value in numbers.items():
                yield (letter, name), value

    def changed(self, values: Mapping[Slot, Any]) -> Leaves:
        """Return the same with other values in some places."""
        letters = zip("sxyp", (self.products, self.x, self.y, self.parameters), strict=True)
        sides = ({name: values.get((letter, name), x) for name, x in numbers.items()} for letter, numbers in letters)
        return Leaves(self.kinds, *sides)

    def entries(self) -> Entries:
        """Return the entries of the tile, as the user's functions read them."""
        (x, x_squares), (y, y_squares) = map(nested, (self.x, self.y))
        s = {
            name: tile_similarities(self.kinds[name], product, x_squares.get(name), y_squares.get(name))
            for name, product in self.products.items()
        }
        return Entries(self.kinds, with_ties(s, x, y), x, y, self.parameters)

    @property
    def only_products(self) -> bool:
        """Whether nothing but one similarity has a gradient, and that is the product itself."""
        learned = [slot for slot, x in self.slots() if isinstance(x, Tensor) and x.requires_grad]
        return learned == [("s", ONE)] and self.kinds[ONE] != DISTANCE

    def gradients(self, outputs: Sequence[Tensor], weights: Sequence[Tensor]) -> dict[Slot, Tensor]:
        """Return the gradients of all leaves that have one."""
        asked = {slot: x for slot, x in self.slots() if isinstance(x, Tensor) and x.requires_grad}
        if not asked or not outputs:
            return {}
        grads = torch.autograd.grad(outputs, [*asked.values()], weights, allow_unused=True)
        return {slot: grad for slot, grad in zip(asked, grads, strict=True) if grad is not None}


Masks = Sequence[Tensor | None] | None  # of terms that read no similarity; None: none of them is known


def update_(
    term: Reduced, values: Values, rows: Tensor | None, cols: Tensor | None, firsts: tuple[int | Tensor, int | Tensor]
) -> None:
    """Add a term's values of a tile to the kept numbers of its rows and of its columns, (k, numbers), in place.

    Args:
        term: the term.
        values: of the tile.
        rows: the kept numbers of rows; None: they do not read the term here.
        cols: those of columns, likewise.
        firsts: the indices of the first row and of the first column.
    """
    if rows is not None:
        term.rule.update_(rows, values, 1, firsts[1])
    if cols is not None:
        term.rule.update_(cols, values, 0, firsts[0])


def sides_of(row_constants: Sequence[Tensor], col_constants: Sequence[Tensor]) -> list[tuple[Sequence[Tensor], int]]:
    """Return the numbers that a rule needs of rows and of columns, each with the dimension they are spread over."""
    return [(numbers, dim) for numbers, dim in ((row_constants, 1), (col_constants, 0)) if len(numbers)]


def collect(
    rule: Rule, values: Values, sides: Iterable[tuple[Sequence[Tensor], int]], into: list[tuple[Tensor, Tensor]]
) -> None:
    """Append a term's outputs of a tile that have a gradient, each with dL by it.

    Args:
        rule: of the term.
        values: of the tile.
        sides: from `sides_of`.
        into: the list of outputs.
    """
    if not values.differentiable:
        return
    assert values.value is not None
    dtype = values.value.dtype
    with torch.no_grad():
        parts = [rule.weights(values, [x.to(dtype).unsqueeze(dim) for x in numbers]) for numbers, dim in sides]
        for output, *side_weights in zip((values.value, values.log_weight), *parts, strict=True):
            if output is not None and output.requires_grad:
                total = side_weights[0] if len(side_weights) == 1 else side_weights[0] + side_weights[1]
                into.append((output, total.expand(values.shape).sum_to_size(output.shape).to(output.dtype)))


class PlainTiles:
    """Tiles that eager PyTorch computes, scores that are affine in s without autograd.

    Args:
        reduced: the terms.
        room: returns memory for a tile, by its number: what was in it is lost at the next tile, and at the next use.
        looks: whether numbers of a tile may be looked at; a GPU would wait.
        affine: whether each term's score is, by its number, or its coefficients if all tiles have the same; found at
            the first tile, and remembered here for the backward pass of the same call.
    """

    def __init__(
        self,
        reduced: Sequence[Reduced],
        room: Callable[[Tile, int], Tensor],
        *,
        looks: bool,
        affine: Affine,
    ) -> None:
        self.reduced, self.room, self.looks, self._affine = reduced, room, looks, affine

    def update_(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Tensor | None],
        cols: Sequence[Tensor | None],
        firsts: tuple[int, int],
    ) -> None:
        """Add a tile to the kept numbers of its rows and columns, of each term that a side reads, in place."""
        entries = leaves.entries()
        affine = self._affine_terms(entries)
        for index, reduced in enumerate(self.reduced):
            candidates, room = _mask(entries, reduced.term, masks, index), self.room(tile, 0)
            affine_score = affine.get(index)
            if affine_score is not None:
                score = affine_score.score_(leaves.products[ONE].detach(), self.room(tile, 1))
                values = Values(tile.shape, candidates, score, room=room)
            else:
                values = replace(entries.values(reduced.term, candidates, safe=False), room=room)
            update_(reduced, values, rows[index], cols[index], firsts)

    def gradients(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Sequence[Tensor]],
        cols: Sequence[Sequence[Tensor]],
    ) -> dict[Slot, Tensor]:
        """Return the gradients of a tile's leaves.

        Args:
            tile: its place.
            leaves: of the tile.
            masks: of terms.
            rows: the numbers that each term's rule needs of rows, (m,) each; none where rows do not read the term.
            cols: those of columns, (n,) each, likewise.
        """
        masked = any(reduced.term.where is not None for reduced in self.reduced)
        unknown = any(reduced.term.scored and reduced.term.factor is None for reduced in self.reduced)
        safe = masked and not self.looks and unknown
        grads = self._gradients(tile, leaves, masks, rows, cols, safe=safe)
        if masked and self.looks and not all(bool(grad.sum().isfinite()) for grad in grads.values()):
            grads = self._gradients(tile, leaves, masks, rows, cols, safe=True)
        return grads

    def _gradients(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Sequence[Tensor]],
        cols: Sequence[Sequence[Tensor]],
        *,
        safe: bool,
    ) -> dict[Slot, Tensor]:
        """Return the gradients of a tile's leaves.

        With `safe=False` entries that are no candidates reach the scores as they are. Their weight is 0, and spoils a
        sum only if a slope there is infinite or NaN; then the sum is NaN.
        """
        outputs = list[tuple[Tensor, Tensor]]()
        product_grad: Tensor | None = None  # from affine scores
        with torch.enable_grad():
            entries = leaves.entries()
            affine = {} if safe else self._affine_terms(entries)
            for index, reduced in enumerate(self.reduced):
                if not reduced.rule.constants:
                    continue
                candidates, affine_score = _mask(entries, reduced.term, masks, index), affine.get(index)
                sides = sides_of(rows[index], cols[index])
                if affine_score is None and reduced.term.slope is not None and not safe and leaves.only_products:
                    product_grad = _added(product_grad, self._by_slope(reduced, entries, candidates, sides))
                    continue
                if affine_score is None:
                    collect(reduced.rule, entries.values(reduced.term, candidates, safe=safe), sides, outputs)
                    continue
                score = affine_score.score_(leaves.products[ONE].detach(), self.room(tile, 1))
                total = self._weights_of(reduced.rule, tile, candidates, score, sides)
                outputs += affine_score.outputs(leaves.products[ONE].detach(), score, total)
                slope = affine_score.a.detach().to(score.dtype)
                if product_grad is None:
                    product_grad = torch.mul(total, slope, out=self.room(tile, 3))
                else:
                    product_grad.addcmul_(total, slope)
        grads = leaves.gradients(*zip(*outputs, strict=True)) if outputs else {}
        products = leaves.products.get(ONE)
        if product_grad is not None and products is not None and products.requires_grad:
            beside = grads.get(("s", ONE))
            grads["s", ONE] = product_grad if beside is None else product_grad.add_(beside)
        return grads

    @torch.no_grad()
    def _by_slope(
        self, reduced: Reduced, entries: Entries, mask: Tensor | None, sides: Iterable[tuple[Sequence[Tensor], int]]
    ) -> Tensor:
        """Return dL/ds of a tile for a term whose score has a given slope."""
        assert reduced.term.slope is not None
        values = entries.values(reduced.term, mask, safe=False)
        assert values.value is not None
        dtype = values.value.dtype
        total = torch.zeros(values.shape, dtype=dtype, device=values.value.device)
        for numbers, dim in sides:
            weights, _ = reduced.rule.weights(values, [x.to(dtype).unsqueeze(dim) for x in numbers])
            assert weights is not None
            total += weights
        return total.mul_(entries.call(reduced.term.slope))

    @torch.no_grad()
    def _weights_of(
        self, rule: Rule, tile: Tile, mask: Tensor | None, score: Tensor, sides: Iterable[tuple[Sequence[Tensor], int]]
    ) -> Tensor:
        """Return dL/df of a tile for a term whose scores are known, in memory that the next term overwrites."""
        parts = []
        for number, (numbers, dim) in enumerate(sides):
            values = Values(tile.shape, mask, score, room=self.room(tile, 2 * number))
            weights, _ = rule.weights(values, [x.to(score.dtype).unsqueeze(dim) for x in numbers])
            assert weights is not None
            parts.append(weights)
        return parts[0] if len(parts) == 1 else torch.add(parts[0], parts[1], out=self.room(tile, 0))

    def _affine_terms(self, entries: Entries) -> dict[int, Coefficients]:
        """Return the coefficients of affine scores on a tile, by the numbers of their terms."""
        terms = [reduced.term for reduced in self.reduced]
        fitted = {i: by_factor(term, entries) for i, term in enumerate(terms) if term.factor is not None}
        if not self.looks or len(fitted) == len(terms):
            return fitted
        if not self._affine:
            few = entries.first()
            for i, term in enumerate(terms):
                may_be = term.slope is None and i not in fitted and may_be_affine(term, entries.kinds)
                self._affine[i] = may_be and is_affine(term, few) and confirmed(term, few)
        for i, known in self._affine.items():
            score = coefficients(terms[i], entries) if known is True else known
            if isinstance(score, Coefficients):
                fitted[i] = score
                if known is True and are_constant(score, entries):
                    self._affine[i] = score
        return fitted


def _added(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)


def _mask(entries: Entries, term: Term, known: Masks, index: int) -> Tensor | None:
    """Return a term's candidates, which may be known unless they depend on similarities."""
    return entries.mask(term) if known is None or term.mask_reads_similarity else known[index]
