"""Tiles of S for kernels: their parts of X and Y, their special entries, and the products of dS with X and Y.

A kernel writes a tile of dS in the precision of its factors. Two products add it to dX and dY, in float32. No other
tile is in memory, so this tile may take as many bytes as the two tiles of plain PyTorch. A kernel that sums up S writes
partial sums alone: it computes as many entries in one launch as have partial sums of these bytes.

Factors are in the dtype of the features, unless the caller has named a precision, or autocast has chosen one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from .. import kernels
from .._precision import accumulation_dtype
from ..partition import Tile
from .driver import Block, Driver, add_pairs_, relative
from .launches import launches
from .members import Members, members
from .pairs import Diagonals, Index, Pairs

LARGEST = 2.0**14  # bound of an entry of dS in float16
_TILES = 2  # of plain PyTorch's sweep
_ENTRIES_OF_A_BYTE = 2  # of partial sums: a program writes at most 4 in float32 for each row and column of 64 x 64
_DTYPES = (torch.float32, torch.bfloat16)


@dataclass
class KernelTiles:
    """The tiles of a driver's rows with one block of columns after another.

    Args:
        driver: of the rows; the caller adds its bias.
        positive, excluded: sets of entries.
        candidates: code of the candidates, as in :class:`kernels.TileInputs`.
        row_terms: scales and offsets of the rows, or None.
        bytes_of_an_entry: all tiles' bytes for an entry of S, here and in plain PyTorch.
        dtype: of the factors, and of dS.
        pairs: the sets that `positive` and `excluded` describe.
    """

    driver: Driver
    positive: Members
    excluded: Members
    candidates: int
    row_terms: kernels.RowTerms | None
    bytes_of_an_entry: tuple[int, int]
    dtype: torch.dtype
    pairs: Pairs
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
            scales = torch.ones(driver.count, dtype=torch.float32, device=device)
            row_terms = kernels.RowTerms(scales if driver.norms is None else scales.div_(driver.norms[:, 0]), offsets)
        if bytes_of_an_entry is None:
            bytes_of_an_entry = dtype.itemsize, _TILES * driver.dtype.itemsize
        return cls(driver, positive, excluded, candidates, row_terms, bytes_of_an_entry, dtype, pairs)

    def of_gradients(self, block: Block) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        """Yield each tile of the block whose dS, or exponentials, a kernel writes."""
        ours, theirs = self.bytes_of_an_entry
        yield from self._of(block, self._plain_entries(block) * theirs // ours)

    def of_sums(self, block: Block) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        """Yield each tile of the block of which a kernel writes sums alone: mostly the whole block."""
        ours, theirs = self.bytes_of_an_entry
        parts = max(1, ours // self.dtype.itemsize)
        yield from self._of(block, self._plain_entries(block) * theirs * _ENTRIES_OF_A_BYTE // parts)

    def _plain_entries(self, block: Block) -> int:
        """Return the entries of a tile of plain PyTorch's."""
        rows, cols = (min(self.driver.side, at.stop - at.start) for at in (block.rows, block.cols))
        return max(1, rows * cols)

    def _of(self, block: Block, entries: int) -> Iterator[tuple[Tile, kernels.TileInputs]]:
        driver, row_terms = self.driver, self.row_terms
        for tile in launches(block, entries, driver.side):
            of_tile = None
            if row_terms is not None:
                offsets = None if row_terms.offsets is None else row_terms.offsets[tile.rows]
                of_tile = kernels.RowTerms(row_terms.scales[tile.rows], offsets)
            yield (
                tile,
                kernels.TileInputs(
                    driver.rows(tile.rows).to(self.dtype),
                    block.y[relative(tile.cols, block), : driver.width].to(self.dtype),
                    driver.scale,
                    self.positive.of_tile(tile),
                    self.excluded.of_tile(tile),
                    self.candidates,
                    tile.rows.start,
                    of_tile,
                    None if driver.col_norms is None else driver.col_norms[tile.cols, 0].reciprocal().float(),
                    driver.precision.allows_tf32,
                ),
            )

    @property
    def _of_gradients(self) -> torch.dtype:
        """The dtype of dS: float16 instead of bfloat16, unless rows are divided by norms, which may be short."""
        fits = self.row_terms is None and self.driver.col_norms is None
        return torch.float16 if fits and self.dtype == torch.bfloat16 and self.driver.precision.units else self.dtype

    def gradient(self, tile: Tile, *several: int) -> Tensor:
        """Return memory for a tile of dS, or for several."""
        shape = (*several, *tile.shape)
        if self._written is None or self._written.numel() < prod(shape):
            self._written = None  # free it before the larger one is allocated
            self._written = self.driver.x.new_empty(prod(shape), dtype=self._of_gradients)
        return self._written[: prod(shape)].view(shape)

    def apart(self, tile: Tile) -> Index | None:
        """Return the positives of a tile whose dS is multiplied apart because the tile is rounded; None without."""
        listed = self.dtype != torch.float32 and isinstance(self.pairs.positive, Diagonals)
        return self.pairs.positive.within(tile, self.driver.x.device) if listed else None

    def add_apart(
        self,
        at: Index,
        entries: Tensor,
        tile: Tile,
        of: kernels.TileInputs,
        block: Block,
        u: Tensor | None,
        v: Tensor | None,
    ) -> None:
        """Add products of the entries of dS, (k,), at an index that `apart` has returned; as in `products`."""
        if of.row_terms is not None:
            entries = entries * of.row_terms.scales[at[0]]
        if of.col_scales is not None:
            entries = entries * of.col_scales[at[1]]
        u = None if u is None else u[tile.rows]
        v = None if v is None or tile.self_transposed else v[relative(tile.cols, block)]
        add_pairs_(at, entries, (of.x,), (of.y,), u, v)

    def products(
        self, grad: Tensor, tile: Tile, of: kernels.TileInputs, block: Block, u: Tensor | None, v: Tensor | None
    ) -> None:
        """Add the tile of dS times its rows of Y to `u`, (b, d), and its transpose times X to `v`, (n, d)."""
        precision = self.driver.precision
        if u is not None:
            precision.multiply((grad,), (of.y.to(grad.dtype),), u[tile.rows], add=True)
        if v is not None and not tile.self_transposed:
            precision.multiply((grad.T,), (of.x.to(grad.dtype),), v[relative(tile.cols, block)], add=True)


def columns_of_tiles(side: int, dtype: torch.dtype) -> int:
    """Return the columns of a tile of dS with `side` rows and the memory of two tiles of this side in plain PyTorch.

    >>> columns_of_tiles(4096, torch.bfloat16), columns_of_tiles(4096, torch.float32)
    (16384, 8192)
    """
    return side * _TILES * accumulation_dtype(dtype).itemsize // dtype.itemsize
