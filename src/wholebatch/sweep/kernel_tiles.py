"""Tiles of S for kernels: their parts of X and Y, their special entries, and the products of dS with X and Y.

Positive pairs on diagonals do not enter a kernel: their logits are products of a row of X with a row of Y, in float32,
and so are their products with dS, whose entries they leave 0. In tiles of 16 bits their rounding would be as large as
that of all others together.

A kernel writes a tile of dS in the precision of its factors. Two products add it to dX and dY, in float32. No other
tile is in memory, so this tile may take as many bytes as the two tiles of plain PyTorch. A kernel that sums up S writes
partial sums alone: it computes as many entries in one launch as have partial sums of these bytes.

Factors are in the dtype of the features, unless the caller has named a precision, or autocast has chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import log, prod

import torch
from torch import Tensor

from .. import kernels
from .._base.precision import accumulation_dtype
from ..partition import Tile
from .driver import Block, Driver, relative
from .launches import launches
from .members import Members, members
from .pairs import Diagonals, Pairs

LARGEST = 2.0**14  # bound of an entry of dS in float16
_TILES = 2  # of plain PyTorch's sweep
_ENTRIES_OF_A_BYTE = 2  # of partial sums: a program writes at most 4 in float32 for each row and column of 64 x 64
_DTYPES = (torch.float32, torch.bfloat16)
_WHOLE = 2**27  # bytes of X that are converted once for all tiles; a larger X is, a strip of rows at a time
_WIDENED = 2**14  # rows whose products are in memory at a time
_EIGHT = 8  # columns of dS: 16 bytes, at a multiple of which its rows begin


@dataclass(eq=False)
class NamedPairs:
    """Positive pairs of a block that lie on a diagonal."""

    rows: slice  # their rows, among the local ones
    cols: slice  # their columns, among those of the block
    # x, y: their rows of X and of Y, in the dtype of the factors
    x: Tensor
    y: Tensor
    scale: Tensor  # of S, (), float64, as kernels represent it
    scales: Tensor | None  # the factors that their rows and columns have beside it; None: 1
    offsets: Tensor | None  # of their rows; None: 0

    def logits(self) -> Tensor:
        """Return S_ij, (k,), float64, from products in float32, without the driver's bias."""
        parts = zip(self.x.split(_WIDENED), self.y.split(_WIDENED), strict=True)
        products = [torch.mul(x.float(), y).sum(1, dtype=torch.float64) for x, y in parts]
        logits = (products[0] if len(products) == 1 else torch.cat(products)).mul_(self.scale)
        if self.scales is not None:
            logits.mul_(self.scales)
        return logits if self.offsets is None else logits.add_(self.offsets)

    def add_products_(self, entries: Tensor, u: Tensor | None, v: Tensor | None) -> None:
        """Add the products of these entries of dS, (k,), with Y to `u`, (b, d), and with X to `v`, (n, d)."""
        if self.scales is not None:
            entries = entries * self.scales
        entries = entries.float().unsqueeze(1)
        for product, part, factor in ((u, self.rows, self.y), (v, self.cols, self.x)):
            if product is not None:
                product[part].addcmul_(factor, entries)


@dataclass(eq=False)
class KernelTiles:
    """The tiles of a driver's rows with one block of columns after another."""

    driver: Driver  # of the rows; the caller adds its bias
    # positive, excluded: sets of entries
    positive: Members
    excluded: Members
    candidates: int  # code of the candidates, as in :class:`kernels.TileInputs`
    row_terms: kernels.RowTerms | None  # scales and offsets of the rows, or None
    bytes_of_an_entry: tuple[int, int]  # all tiles' bytes for an entry of S, here and in plain PyTorch
    dtype: torch.dtype  # of the factors, and of dS
    diagonals: Diagonals | None  # the positive pairs that do not enter a kernel; None: all do
    col_scales: Tensor | None = None
    numbers: Tensor | None = field(default=None, init=False)  # as in `kernels.TileInputs`
    _rows: tuple[slice, list[Tensor]] | None = field(default=None, init=False)
    _cols: tuple[Block, list[Tensor]] | None = field(default=None, init=False)
    _written: Tensor | None = field(default=None, init=False)

    @classmethod
    def of(
        cls,
        driver: Driver,
        pairs: Pairs,
        columns: int,
        *,
        candidates: int = 0,
        offsets: Tensor | None = None,
        bytes_of_an_entry: tuple[int, int] | None = None,
        float16: bool = False,
        apart: bool = True,
    ) -> KernelTiles | None:
        """Return tiles that take the memory of plain PyTorch's; None if kernels do not support the case.

        Args:
            driver: of the rows.
            pairs: positive and excluded entries.
            columns: number of columns of the global batch.
            candidates: as above.
            offsets: (b,), offsets of the rows, or None.
            bytes_of_an_entry: all tiles' bytes for an entry of S, here and in plain PyTorch; None: those of one tile
                of dS here, and of two tiles there.
            float16: whether dS fits into float16 if rows are not divided by norms.
            apart: whether the caller takes positive pairs on diagonals from :meth:`pairs`.
        """
        normed = driver.norms is not None or driver.col_norms is not None
        dtype = driver.precision.dtype_in_kernels(driver.x.dtype)
        if dtype not in _DTYPES and not (dtype == torch.float16 and float16 and not normed):
            return None
        device = driver.x.device
        positive, excluded = (members(entries, columns, device) for entries in (pairs.positive, pairs.excluded))
        if positive is None or excluded is None:
            return None
        row_terms = None
        if normed or offsets is not None:
            norms = driver.norms
            scales = torch.ones(driver.count, device=device) if norms is None else norms[:, 0].float().reciprocal()
            row_terms = kernels.RowTerms(scales, None if offsets is None else offsets.float().contiguous())
        if bytes_of_an_entry is None:
            bytes_of_an_entry = dtype.itemsize, _TILES * driver.dtype.itemsize
        diagonals = pairs.positive if apart and isinstance(pairs.positive, Diagonals) else None
        col_scales = None if driver.col_norms is None else driver.col_norms[:, 0].reciprocal().float()
        return cls(
            driver, positive, excluded, 0 if diagonals is not None else candidates, row_terms, bytes_of_an_entry,
            dtype, diagonals, col_scales,
        )  # fmt: skip

    def set_numbers(self, other: float | Tensor) -> None:
        """Make the numbers that all tiles share, unless an earlier block has: the scale and a shift or bias."""
        if self.numbers is None:
            self.numbers = kernels.numbers_of(self.driver.scale, other, self.driver.x.device)

    @cached_property
    def scale_and_other(self) -> tuple[Tensor, Tensor]:
        """The scale, and the shift or bias, as kernels represent them, (), float64."""
        assert self.numbers is not None
        scale, other = (self.numbers.double() * log(2)).unbind()
        return scale, other

    def of_gradients(self, block: Block) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        """Yield each tile of the block whose dS a kernel writes."""
        yield from self._launches(block, _entries(block, self.driver.side, self.bytes_of_an_entry))

    def of_sums(self, block: Block) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        """Yield each tile of the block of which a kernel writes sums alone: mostly the whole block."""
        ours, theirs = self.bytes_of_an_entry
        parts = max(1, ours // self.dtype.itemsize)
        yield from self._launches(block, _entries(block, self.driver.side, (parts, theirs * _ENTRIES_OF_A_BYTE)))

    def _launches(self, block: Block, entries: int) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        terms, tf32 = self.row_terms, self.driver.precision.allows_tf32
        for tile in launches(block, entries, self.driver.side):
            rows, cols = tile.rows, tile.cols
            tile_terms = None
            if terms is not None:
                offsets = None if terms.offsets is None else terms.offsets[rows]
                tile_terms = kernels.RowTerms(terms.scales[rows], offsets)
            yield (
                tile,
                kernels.TileInputs(
                    self._x(rows),
                    self._y(block)[relative(cols, block)],
                    self.numbers,
                    self.positive.of_tile(tile),
                    self.excluded.of_tile(tile),
                    self.candidates,
                    rows.start,
                    tile_terms,
                    None if self.col_scales is None else self.col_scales[cols],
                    tf32,
                ),
            )

    def _x(self, rows: slice, *, beside_gradient: bool = False) -> Tensor:
        """Return rows of X as kernels read them, or in the dtype in which they are multiplied with dS."""
        kept = self._rows
        if kept is None or not (kept[0].start <= rows.start and rows.stop <= kept[0].stop):
            driver, self._rows = self.driver, None  # free them before others are allocated
            fits = driver.index is None and driver.x.numel() * self.dtype.itemsize <= _WHOLE
            held = slice(0, driver.count) if fits else rows
            kept = self._rows = (held, [kernels.laid_out(driver.rows(held).to(self.dtype))])
        start, factors = kept[0].start, kept[1]
        return self._factor(factors, beside_gradient)[rows.start - start : rows.stop - start]

    def _y(self, block: Block, *, beside_gradient: bool = False) -> Tensor:
        """Return the block's rows of Y in the same forms."""
        if self._cols is None or self._cols[0] is not block:
            self._cols = None
            self._cols = (block, [kernels.laid_out(block.y[:, : self.driver.width].to(self.dtype))])
        return self._factor(self._cols[1], beside_gradient)

    def _factor(self, factors: list[Tensor], beside_gradient: bool) -> Tensor:
        """Return rows as they are read, or beside dS: converted at the first use, and kept."""
        if beside_gradient and len(factors) == 1:
            factors.append(factors[0].to(self._gradient_dtype))
        return factors[beside_gradient]

    @property
    def _gradient_dtype(self) -> torch.dtype:
        """The dtype of dS: float16 instead of bfloat16, unless rows are divided by norms, which may be short."""
        fits = self.row_terms is None and self.driver.col_norms is None
        return torch.float16 if fits and self.dtype == torch.bfloat16 and self.driver.precision.units else self.dtype

    def gradient(self, tile: Tile, *several: int) -> Tensor:
        """Return memory for a tile of dS, or for several, whose rows begin at multiples of 16 bytes."""
        shape = (*several, *tile.shape)
        needed = entries_of_memory(shape)
        if self._written is None or self._written.numel() < needed:
            self._written = None  # free it before the larger one is allocated
            self._written = self.driver.x.new_empty(needed, dtype=self._gradient_dtype)
        return in_memory(self._written, shape)

    def pairs(self, block: Block) -> Iterator[NamedPairs]:
        """Yield the positive pairs of a block that do not enter a kernel, one diagonal after the other."""
        area, terms = Tile(block.rows, block.cols), self.row_terms
        for diagonal in () if self.diagonals is None else self.diagonals.diagonals:
            row, col, count = diagonal.within(area)
            if not count:
                continue
            row += block.rows.start
            rows, cols = slice(row, row + count), slice(col, col + count)
            scales = offsets = None
            if terms is not None:
                scales, offsets = terms.scales[rows], None if terms.offsets is None else terms.offsets[rows]
                if self.col_scales is not None:
                    scales = scales * self.col_scales[block.cols][cols]
            yield NamedPairs(rows, cols, self._x(rows), self._y(block)[cols], self.scale_and_other[0], scales, offsets)

    def products(self, grad: Tensor, tile: Tile, block: Block, u: Tensor | None, v: Tensor | None) -> None:
        """Add the tile of dS times its rows of Y to `u`, (b, d), and its transpose times X to `v`, (n, d)."""
        multiply, cols = self.driver.precision.multiply, relative(tile.cols, block)
        if u is not None:
            multiply((grad,), (self._y(block, beside_gradient=True)[cols],), u[tile.rows], add=True)
        if v is not None and not tile.self_transposed:
            multiply((grad.T,), (self._x(tile.rows, beside_gradient=True),), v[cols], add=True)


def _entries(block: Block, side: int, bytes_of_an_entry: tuple[int, int]) -> int:
    """Return the entries of one launch: of so many bytes each, as many as a tile of plain PyTorch takes."""
    rows, cols = (min(side, part.stop - part.start) for part in (block.rows, block.cols))
    ours, theirs = bytes_of_an_entry
    return max(1, rows * cols) * theirs // ours


def entries_of_memory(shape: tuple[int, ...]) -> int:
    """Return the entries of memory for a tile of dS, or for several, whose rows begin at multiples of 16 bytes."""
    return prod(shape[:-1]) * -(-shape[-1] // _EIGHT) * _EIGHT


def in_memory(memory: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a tile of dS, or several, as a view of such memory."""
    wide = -(-shape[-1] // _EIGHT) * _EIGHT
    return memory[: prod(shape[:-1]) * wide].view(*shape[:-1], wide)[..., : shape[-1]]


def tiles_of_launches(block: Block, side: int, dtype: torch.dtype) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return the tiles of a block of which a kernel writes sums, and those of which it writes dS in this dtype."""
    plain = _TILES * accumulation_dtype(dtype).itemsize
    entries = [_entries(block, side, each) for each in ((1, plain * _ENTRIES_OF_A_BYTE), (dtype.itemsize, plain))]
    sum_tiles, gradient_tiles = (tuple(launches(block, most, side)) for most in entries)
    return sum_tiles, gradient_tiles


def columns_of_tiles(side: int, dtype: torch.dtype) -> int:
    """Return the columns of a tile of dS with `side` rows and the memory of two tiles of this side in plain PyTorch.

    >>> columns_of_tiles(4096, torch.bfloat16), columns_of_tiles(4096, torch.float32)
    (16384, 8192)
    """
    return side * _TILES * accumulation_dtype(dtype).itemsize // dtype.itemsize
