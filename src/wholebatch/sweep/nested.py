"""The nested sweep: the same sums for several leading parts of the features at once (Matryoshka).

    S^l_ij = scale r^l_i q^l_j sum_{k < m_l} x_ik y_jk,        m_1 < m_2 < ... and r, q the inverse norms of the parts

The products of a part are the products of the part before, plus those of a few more features. All parts together cost
as much as the largest one, 1 unit of multiply-adds. Backward, with G^l_ij = scale r^l_i q^l_j dS^l_ij, the gradient of
the features between m_{l-1} and m_l is the sum of G over l and all larger parts: 3 units in all. Memory holds a tile of
each part.

The derivative by the inverse norms is sum_j dS^l_ij S^l_ij / r^l_i for rows, and likewise for columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..partition import Tile
from .driver import Block, Driver, relative
from .pairs import Index, Pairs
from .products import Factor, columns, transposed


class NestedSweep:
    """Pass over the blocks of S, in the same order each time; each row of Y carries its inverse norms at the end.

    Args:
        driver: of the rows, with scale 1; it holds three tiles and one for each part.
        pairs: positive and excluded entries; sums run over the negatives.
        dims: m_l.
        inverse_norms: r, (b, number of parts).
        scale: of S.
        shift: of all sums.
    """

    def __init__(
        self, driver: Driver, pairs: Pairs, dims: Sequence[int], inverse_norms: Tensor, scale: float, shift: float
    ) -> None:
        self.driver, self.pairs, self.dims, self.shift = driver, pairs, tuple(dims), shift
        self._parts = [slice(start, stop) for start, stop in zip((0, *dims[:-1]), dims, strict=True)]
        self._rows, self._scale = (scale * inverse_norms).to(driver.dtype), scale
        self._wide = wide_dtype(driver.x.device)

    def sums(self, block: Block, rows: Tensor, targets: Tensor, cols: Tensor | None) -> None:
        """Add exponentials to `rows` (b, parts) and `cols` (n, parts), and positives' logits to `targets`."""
        for tile, x, y in self.driver.tiles(block):
            positives, excluded = (
                entries.within(tile, self.driver.x.device) for entries in (self.pairs.positive, self.pairs.excluded)
            )
            block_cols = relative(tile.cols, block)
            for part in range(len(self.dims)):
                logits = self._logits(part, tile, x, y, block)
                if positives is not None:
                    targets[tile.rows, part].index_add_(0, positives[0], logits[positives].to(targets.dtype))
                exponentials = self._exponentials(logits, positives, excluded)
                rows[tile.rows, part].add_(exponentials.sum(1))
                if cols is not None:
                    cols[block_cols, part].add_(exponentials.sum(0))

    def gradients(
        self,
        block: Block,
        rows: Tensor,
        targets: Tensor,
        cols: Tensor | None,
        u: Tensor | None,
        v: Tensor | None,
        row_sums: Tensor,
        col_sums: Tensor | None,
    ) -> None:
        """Add dX to `u` and dY to `v`, without the factor that the loss applies at the end.

        Args:
            block: of columns.
            rows: a_i / R_i of each part, (b, parts).
            targets: t_i, (b, parts).
            cols: a'_j / C_j, (n, parts).
            u: (b, d), None where not needed.
            v: (n, d), None where not needed.
            row_sums: (b, parts), gets sum_j dS_ij S_ij added.
            col_sums: (n, parts), gets sum_i dS_ij S_ij added; None where not needed.
        """
        dtype, precision = self.driver.dtype, self.driver.precision
        for tile, x, y in self.driver.tiles(block):
            positives, excluded = (
                entries.within(tile, self.driver.x.device) for entries in (self.pairs.positive, self.pairs.excluded)
            )
            block_cols, inverse = relative(tile.cols, block), self._inverse(block)
            for part in range(len(self.dims)):
                grad = self.driver.spare(tile, part).copy_(self._logits(part, tile, x, y, block))
                exponentials = self._exponentials(self.driver.scratch(tile), positives, excluded)
                factor = rows[tile.rows, part].to(dtype).unsqueeze(1)
                if cols is not None:
                    col_factor = cols[block_cols, part].to(dtype)
                    factor = torch.add(factor, col_factor, out=self.driver.spare(tile, len(self.dims)))
                weights = exponentials.mul_(factor)
                if positives is not None:
                    weights[positives] = targets[tile.rows, part][positives[0]].to(dtype)
                grad.mul_(weights)
                row_sums[tile.rows, part].add_(grad.sum(1))
                if col_sums is not None:
                    col_sums[block_cols, part].add_(grad.sum(0))
                torch.mul(weights, self._rows[tile.rows, part].unsqueeze(1), out=grad)
                grad.mul_(inverse[block_cols, part])
            for part in reversed(range(len(self.dims))):
                grad = self.driver.spare(tile, part)
                if part + 1 < len(self.dims):
                    grad.add_(self.driver.spare(tile, part + 1))
                features = self._parts[part]
                grad_factor = self.driver.gradient_factor(grad, tile)
                if u is not None:
                    precision.multiply(grad_factor, columns(y, features), u[tile.rows, features], add=True)
                if v is not None:
                    precision.multiply(transposed(grad_factor), columns(x, features), v[block_cols, features], add=True)

    def _logits(self, part: int, tile: Tile, x: Factor, y: Factor, block: Block) -> Tensor:
        """Return the tile of S^l, in the scratch tile; the products of parts so far stay in the driver's buffer."""
        features, products = self._parts[part], self.driver.buffer(tile)
        x_columns, y_columns = (columns(factor, features) for factor in (x, y))
        self.driver.precision.multiply(x_columns, transposed(y_columns), products, add=part > 0)
        inverse = self._inverse(block)[relative(tile.cols, block), part]
        scaled = torch.mul(products, self._rows[tile.rows, part].unsqueeze(1), out=self.driver.scratch(tile))
        return scaled.mul_(inverse)

    def _inverse(self, block: Block) -> Tensor:
        return block.y[:, self.driver.width :]

    def _exponentials(self, logits: Tensor, positives: Index | None, excluded: Index | None) -> Tensor:
        for left_out in (positives, excluded):
            if left_out is not None:
                logits[left_out] = float("-inf")
        return logits.sub_(self.shift).exp_()
