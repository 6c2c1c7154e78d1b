"""The softmax sweep: tiles of S to row and column sums of exponentials, and tiles of dS to dX and dY.

    S = scale * X Y^T        X: (b, d), the rows at hand        Y: (n, d), a block of columns

Forward, per tile: one product, then the tile's rows and columns are absorbed into their running log-sum-exp.
Backward, per tile: the product once more, then, with P = softmax over the row and Q = softmax over the column,

    dS_ij = P_ij + Q_ij - positive * [i and j are a pair] - uniform
    U_i  += dS_ij y_j             (U = dS Y)
    V_j  += dS_ij x_i             (V = dS^T X)

That is 1 + 3 = 4 units of b * n * d multiply-adds, and two tiles of memory. The positives are subtracted inside
the tile: where training has gone well P_ii + Q_ii is all but 2, and 2 y_i taken off afterwards would leave rounding.

Half-precision features are widened to float32 tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._precision import accumulation_dtype
from ..logsumexp import LogSumExp
from ..partition import Tile, tiles

TILE = 1024  # rows and columns: two tiles are 8 MiB in float32, and a product is large enough for full speed


class SoftmaxSweep:
    """Both directions of a sweep over the block X Y^T, with the buffers that they share.

    Args:
        x: (b, d).
        y: (n, d).
        scale: multiplies every similarity.
        offset: row i and column `offset + i` are a positive pair.
        tile: rows and columns of a tile.
    """

    def __init__(self, x: Tensor, y: Tensor, scale: float, *, offset: int, tile: int = TILE) -> None:
        self.x, self.y, self.scale, self.offset, self.tile = x, y, scale, offset, tile
        self.dtype = accumulation_dtype(x.dtype)
        self._buffer_size = min(tile, len(x)) * min(tile, len(y))

    def statistics(self, rows: LogSumExp, cols: LogSumExp, positives: Tensor) -> None:
        """Absorb the block into `rows` (b pairs) and `cols` (n pairs), and write S_ii into `positives` (b)."""
        logits_buffer, scratch_buffer = self._buffers()
        for tile, x, y in self._tiles():
            logits = _view(logits_buffer, tile)
            scratch = _view(scratch_buffer, tile)
            self._logits(x, y, out=logits)
            if tile.has_positives:
                diagonal = logits.diagonal(tile.diagonal)
                first_row = tile.rows.start + max(0, -tile.diagonal)
                positives[first_row : first_row + len(diagonal)] = diagonal
            rows.absorb(logits, dim=1, at=tile.rows, scratch=scratch)
            cols.absorb(logits, dim=0, at=tile.cols, scratch=scratch)

    def gradients(
        self,
        rows: LogSumExp,
        cols: LogSumExp,
        *,
        positive: float,
        uniform: float,
        u: Tensor | None,
        v: Tensor | None,
    ) -> None:
        """Add dS Y to `u` (b, d) and dS^T X to `v` (n, d), for the finished `rows` and `cols`; None is left out."""
        logits_buffer, grad_buffer = self._buffers()
        inverse_row_sums, inverse_col_sums = rows.sum.reciprocal(), cols.sum.reciprocal()
        for tile, x, y in self._tiles():
            logits = _view(logits_buffer, tile)
            grad = _view(grad_buffer, tile)
            self._logits(x, y, out=logits)
            # P_ij
            torch.sub(logits, rows.shift[tile.rows, None], out=grad).exp_()
            grad.mul_(inverse_row_sums[tile.rows, None])
            # + Q_ij
            logits.sub_(cols.shift[None, tile.cols]).exp_()
            grad.addcmul_(logits, inverse_col_sums[None, tile.cols])
            # - positive - uniform
            if tile.has_positives:
                grad.diagonal(tile.diagonal).sub_(positive)
            if uniform:
                grad.sub_(uniform)
            if u is not None:
                u[tile.rows].addmm_(grad, y)
            if v is not None:
                v[tile.cols].addmm_(grad.T, x)

    def _logits(self, x: Tensor, y: Tensor, *, out: Tensor) -> None:
        out.addmm_(x, y.T, beta=0, alpha=self.scale)

    def _buffers(self) -> tuple[Tensor, Tensor]:
        first, second = torch.empty(2, self._buffer_size, dtype=self.dtype, device=self.x.device)
        return first, second

    def _tiles(self) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        x, rows = self.x[:0], slice(0, 0)
        for tile in tiles(len(self.x), len(self.y), self.tile, self.tile, offset=self.offset):
            if tile.rows != rows:
                x, rows = self.x[tile.rows].to(self.dtype), tile.rows
            yield tile, x, self.y[tile.cols].to(self.dtype)


def _view(buffer: Tensor, tile: Tile) -> Tensor:
    num_rows, num_cols = tile.shape
    return buffer[: num_rows * num_cols].view(num_rows, num_cols)
