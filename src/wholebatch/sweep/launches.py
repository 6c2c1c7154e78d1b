"""The part of S that one launch of a kernel computes: rectangles with as many entries as memory holds.

Three sizes are chosen apart from each other. A transfer brings some columns, all that a sweep then has: a block. A
launch that writes nothing of S computes the whole block, if its partial sums fit into memory. A launch that writes dS
computes a tile: all rows of a small batch with as many columns as fit, because the products of dS with X and Y are fast
if both are large.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isqrt

from ..partition import Tile
from .driver import Block

_MULTIPLE = 128  # rows and columns of the block of entries that one program of a kernel computes


def launches(block: Block, entries: int, strip: int) -> Iterator[Tile]:
    """Cut a block of S into tiles with at most `entries` entries each, row by row.

    Args:
        block: the columns, and their rows.
        entries: the most entries of a tile.
        strip: of a triangle: the most rows of a tile. A strip of rows begins with a square on the diagonal.

    >>> import torch
    >>> block = Block(torch.empty(32768, 0), slice(0, 32768), slice(0, 4096))
    >>> [tile.shape for tile in launches(block, 4096 * 16384, 4096)]
    [(4096, 16384), (4096, 16384)]
    """
    rows, cols = (part.stop - part.start for part in (block.rows, block.cols))
    if block.triangle:
        high = _even_size(rows, min(strip, isqrt(entries)))
        wide = max(high, entries // max(1, high))
    else:
        high, wide = shape_of_tiles(rows, cols, entries)
    for row in range(block.rows.start, block.rows.stop, max(1, high)):
        rows_of_tile = slice(row, min(row + high, block.rows.stop))
        col = block.cols.start
        if block.triangle:
            square = slice(col + row - block.rows.start, col + rows_of_tile.stop - block.rows.start)
            yield Tile(rows_of_tile, square, self_transposed=True)
            col = square.stop
        for first in range(col, block.cols.stop, max(1, wide)):
            yield Tile(rows_of_tile, slice(first, min(first + wide, block.cols.stop)))


def shape_of_tiles(rows: int, cols: int, entries: int) -> tuple[int, int]:
    """Return the rows and columns of tiles with at most `entries` entries: as square as possible, and equal in size.

    >>> [shape_of_tiles(*size, 8192**2) for size in ((4096, 32768), (1_250_000, 4096), (9000, 9000))]
    [(4096, 16384), (16256, 4096), (9000, 4608)]
    """
    high = min(rows, isqrt(entries))
    wide = min(cols, entries // max(1, high))
    wide = _even_size(cols, wide)
    high = _even_size(rows, min(rows, entries // max(1, wide)))
    return high, wide


def _even_size(total: int, most: int) -> int:
    """Return a size of at most `most` that cuts `total` into the fewest parts, nearly equal; a multiple of 128 if big.

    >>> _even_size(9000, 8192), _even_size(9000, 9000), _even_size(45, 30)
    (4608, 9000, 23)
    """
    if total <= most:
        return total
    if most >= _MULTIPLE:
        most -= most % _MULTIPLE
    each = ceil(total / ceil(total / most))
    return min(most, ceil(each / _MULTIPLE) * _MULTIPLE) if most >= _MULTIPLE else each
