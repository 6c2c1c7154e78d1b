"""The sweep of a declared loss: tiles of similarities, forward into the kept numbers, backward into gradients.

    forward    per tile: s by matrix products, each term's mask and scores, and what they add to rows and columns
    backward   the same scores again, with the graph of one tile; autograd takes dL/df back to s, data and parameters

    dL/df_ij = (weight of f_ij in row i) + (weight of f_ij in column j)        one pass through the graph for both

A tile in which the masks of all terms leave no entry is skipped before its products are computed, on a CPU, where
looking at a mask costs little. Work: 1 unit of multiply-adds forward, 3 backward (2 for kept products), and the
functions of the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..partition import Tile, tiles
from ..sweep import Block, Driver, Factor, KeptTiles
from .compiled import CompiledTiles, Kernels
from .row_data import nested
from .tile import Affine, Leaves, Masks, PlainTiles, Reduced, Slot
from .tile_entries import Entries


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
    """The sums of a backward pass that stay on this rank while it goes on.

    Args:
        u: (b, d), dL/dX; None: nobody asks.
        row_number_grads: (b, k), by the learned numbers of rows.
        col_number_grads: (B, k), by the learned numbers of all columns.
        parameter_grads: by each learned parameter.
    """

    u: Tensor | None
    row_number_grads: Tensor
    col_number_grads: Tensor
    parameter_grads: list[Tensor]


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
        kernels: compiled functions of tiles; None: nobody asked for them.
        signature: of the declaration, by which they are kept.
        kept: products of the first tiles, from the forward pass for the backward pass; None: there are none.
        affine: which scores are affine, from the forward pass for the backward pass; empty: not known yet.
        constant: the names of similarities whose features have no gradient.
    """

    kinds: Mapping[str, str]
    drivers: Mapping[str, Driver]
    reduced: Sequence[Reduced]
    x: Side
    y: Side
    parameters: Mapping[str, Tensor | float]
    learned: Sequence[str]
    symmetric: bool = False
    kernels: Kernels | None = None
    signature: str = ""
    kept: KeptTiles | None = None
    affine: Affine = field(default_factory=dict)
    constant: frozenset[str] = frozenset()
    _in_dtype: dict[str, Any] = field(default_factory=dict)
    _latest: tuple[Tile, dict[str, Any], dict[str, Any]] | None = None  # the numbers of the latest tile

    def __post_init__(self) -> None:
        driver = next(iter(self.drivers.values()))
        self.functions: PlainTiles | CompiledTiles = PlainTiles(
            self.reduced, driver.spare, looks=self.x.device.type == "cpu", affine=self.affine
        )
        if self.kernels is not None:
            self.functions = CompiledTiles(self.functions, self.kernels, self.signature, driver.side)

    def forward(
        self, block: Block, rows: Tensor, cols: Tensor | None, slices: tuple[Sequence[slice], Sequence[slice]]
    ) -> None:
        """Add a block to the kept numbers of rows, (b, numbers), and of its columns, (n, numbers)."""
        for tile, factors, masks in self._tiles(block):
            products = {name: self.drivers[name].logits(tile, *factors[name]) for name in factors}
            if self.kept is not None:
                for s in products.values():
                    self.kept.keep(s)
            row_numbers, col_numbers = list[Tensor | None](), list[Tensor | None]()
            each_rows, each_cols = map(iter, slices)
            for reduced in self.reduced:
                row_numbers.append(rows[tile.rows, next(each_rows)] if reduced.rows else None)
                numbers = next(each_cols) if reduced.cols else None
                if numbers is None or tile.self_transposed:
                    col_numbers.append(None)
                else:
                    assert cols is not None
                    col_numbers.append(cols[_relative(tile.cols, block), numbers])
            leaves = Leaves(self.kinds, products, *self._numbers(tile), self._parameters())
            firsts = self.x.offset + tile.rows.start, tile.cols.start
            self.functions.update_(tile, leaves, masks, row_numbers, col_numbers, firsts)

    def backward(
        self, block: Block, rows: Sequence[Tensor], cols: Sequence[Tensor], into: Gradients, v: Tensor | None
    ) -> None:
        """Add a block's part of the gradients.

        Args:
            block: of columns.
            rows: the numbers that each term's rule needs of rows, (constants, b), empty for terms without.
            cols: of the block's columns, (constants, n).
            into: the sums that this rank keeps.
            v: (n, d), dL/dY; None: nobody asks. Of a symmetric matrix u may be a part of it.
        """
        wants = v is not None or into.u is not None
        for tile, factors, masks in self._tiles(block):
            local_cols = _relative(tile.cols, block)
            products = {name: self._products(name, tile, factors[name]) for name in factors}
            row_constants = [[*numbers[:, tile.rows]] for numbers in rows]
            col_constants = [[] if tile.self_transposed else [*numbers[:, local_cols]] for numbers in cols]
            leaves = self._leaves(tile, products, wants=wants)
            grads = self.functions.gradients(tile, leaves, masks, row_constants, col_constants)
            self._add(tile, block, factors, grads, into, v)

    def _products(self, name: str, tile: Tile, factors: tuple[Factor, Factor]) -> Tensor:
        """Return a tile's products from the forward pass, or computed again."""
        kept = None if self.kept is None else self.kept.next(tile.shape)
        return self.drivers[name].logits(tile, *factors) if kept is None else kept

    def _tiles(self, block: Block) -> Iterator[tuple[Tile, dict[str, tuple[Factor, Factor]], Masks]]:
        """Yield the tiles that have an entry, with their factors for each similarity, and masks."""
        driver = next(iter(self.drivers.values()))
        for tile in tiles(block.rows, block.cols, driver.side, triangle=block.triangle):
            empty, masks = self._masks(tile)
            if empty:
                continue
            factors, start = {}, 0
            for name, each in self.drivers.items():
                factors[name] = each.factors(tile, block, start)
                start += each.width
            yield tile, factors, masks

    def _masks(self, tile: Tile) -> tuple[bool, Masks]:
        """Return whether no term has an entry in a tile, and the masks of terms that read no similarity."""
        terms = [reduced.term for reduced in self.reduced]
        early = [term.where is not None and not term.mask_reads_similarity for term in terms]
        looks = self.x.device.type == "cpu" and all(early)
        if isinstance(self.functions, CompiledTiles):
            # Kernels compute masks again. Whether there is an entry, the first row shows for most tiles.
            first = Tile(slice(tile.rows.start, tile.rows.start + 1), tile.cols)
            empty = looks and _all_empty(self._masks_of(first)) and _all_empty(self._masks_of(tile))
            return empty, None
        masks = self._masks_of(tile) if any(early) else [None] * len(terms)
        return looks and _all_empty(masks), masks

    def _masks_of(self, tile: Tile) -> list[Tensor | None]:
        shape = torch.empty(tile.shape, device="meta")
        x, y = (nested(numbers)[0] for numbers in self._numbers(tile))
        entries = Entries(self.kinds, dict.fromkeys(self.kinds, shape), x, y, {})
        terms = [reduced.term for reduced in self.reduced]
        known: dict[int, Tensor | None] = {}  # terms may share a mask
        for term in terms:
            if id(term.where) not in known:
                known[id(term.where)] = None if term.mask_reads_similarity else entries.mask(term)
        return [known[id(term.where)] for term in terms]

    def _numbers(self, tile: Tile) -> tuple[dict[str, Any], dict[str, Any]]:
        if self._latest is None or self._latest[0] is not tile:
            self._latest = tile, self.x.at(tile.rows, 1), self.y.at(tile.cols, 0)
        return dict(self._latest[1]), dict(self._latest[2])

    def _parameters(self) -> dict[str, Any]:
        """Return the parameters in the precision of tiles: one of float64 would widen all of them."""
        if not self._in_dtype:
            dtype = next(iter(self.drivers.values())).dtype
            for name, value in self.parameters.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    value = value.detach().to(dtype)
                self._in_dtype[name] = value
        return dict(self._in_dtype)

    def _leaves(self, tile: Tile, products: Mapping[str, Tensor], *, wants: bool) -> Leaves:
        """Return products, numbers and parameters as leaves of the tile's graph."""
        x, y = self._numbers(tile)
        for numbers, names in ((x, self.x.learned), (y, self.y.learned)):
            for name in names:
                numbers[name] = numbers[name].detach().requires_grad_()
        parameters = self._parameters()
        parameters |= {name: parameters[name].detach().requires_grad_() for name in self.learned}
        s = {name: x.detach().requires_grad_(wants and name not in self.constant) for name, x in products.items()}
        return Leaves(self.kinds, s, x, y, parameters)

    def _add(
        self,
        tile: Tile,
        block: Block,
        factors: Mapping[str, tuple[Factor, Factor]],
        grads: Mapping[Slot, Tensor],
        into: Gradients,
        v: Tensor | None,
    ) -> None:
        """Add the gradients by a tile's leaves to the sums."""
        start, tile = 0, Tile(tile.rows, tile.cols)  # on the diagonal as well, where it holds all of its entries
        for name, driver in self.drivers.items():
            columns = slice(start, start + driver.width)
            start = columns.stop
            grad = grads.get(("s", name))
            if grad is not None:
                u = None if into.u is None else into.u[:, columns]
                y_grad = None if v is None else v[:, columns]
                driver.products(grad.contiguous(), tile, *factors[name], block, u, y_grad)
        for number, name in enumerate(self.x.learned):
            grad = grads.get(("x", name))
            if grad is not None:
                into.row_number_grads[tile.rows, number].add_(grad[:, 0])
        for number, name in enumerate(self.y.learned):
            grad = grads.get(("y", name))
            if grad is not None:
                into.col_number_grads[tile.cols, number].add_(grad[0])
        for number, name in enumerate(self.learned):
            grad = grads.get(("p", name))
            if grad is not None:
                into.parameter_grads[number] += grad


def _all_empty(masks: Sequence[Tensor | None]) -> bool:
    return all(mask is not None and _is_empty(mask) for mask in {id(mask): mask for mask in masks}.values())


def _is_empty(mask: Tensor) -> bool:
    """Return whether a mask leaves no entry; most masks show one in their first row."""
    return not (bool((mask[0] if mask.dim() else mask).any()) or bool(mask.any()))


def _relative(cols: slice, block: Block) -> slice:
    return slice(cols.start - block.cols.start, cols.stop - block.cols.start)
