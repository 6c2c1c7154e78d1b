"""Who owns which rows: frozen integers, no tensors, no processes.

The global batch is the concatenation of the ranks' rows, rank 0 first. Everything that depends on this
order (slices, offsets, the place of the positive pairs, the tiles of a sweep) is computed here, once, from
the row counts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Partition", "Tile", "tiles"]


@dataclass(frozen=True)
class Partition:
    """Consecutive rows ``[offsets[r], offsets[r] + counts[r])`` of the global batch belong to rank r.

    Counts may differ between ranks and may be zero.

    >>> p = Partition((3, 0, 2))
    >>> p.total, p.offsets
    (5, (0, 3, 3))
    >>> p.rows(2)
    slice(3, 5, None)
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.counts or min(self.counts) < 0:
            raise ValueError(f"a partition needs at least one count, none negative; got {self.counts}")

    @classmethod
    def even(cls, total: int, parts: int) -> Partition:
        """Split `total` rows as evenly as possible, the remainder going to the first parts.

        >>> Partition.even(10, 4).counts
        (3, 3, 2, 2)
        """
        if parts < 1 or total < 0:
            raise ValueError(f"need parts >= 1 and total >= 0; got parts={parts}, total={total}")
        quotient, remainder = divmod(total, parts)
        return cls(tuple(quotient + (part < remainder) for part in range(parts)))

    @property
    def total(self) -> int:
        """Rows of the global batch, B."""
        return sum(self.counts)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Global index of each rank's first row."""
        return tuple(sum(self.counts[:part]) for part in range(len(self.counts)))

    def rows(self, rank: int) -> slice:
        """The global rows that `rank` owns."""
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


@dataclass(frozen=True)
class Tile:
    """One macro-tile of the similarity matrix: local rows x columns of the block at hand.

    `diagonal` is the diagonal of the tile on which its positive pairs lie: entry (i, i + diagonal) of the
    tile is a positive pair wherever it falls inside. See :func:`tiles`.
    """

    rows: slice
    cols: slice
    diagonal: int

    @property
    def shape(self) -> tuple[int, int]:
        """(number of rows, number of columns)."""
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start

    @property
    def has_positives(self) -> bool:
        """Whether the positives' diagonal crosses this tile."""
        num_rows, num_cols = self.shape
        return -num_rows < self.diagonal < num_cols


def tiles(num_rows: int, num_cols: int, tile_rows: int, tile_cols: int, *, offset: int = 0) -> Iterator[Tile]:
    """Cut a num_rows x num_cols block into tiles, row blocks outermost.

    Row i of the block and column `offset + i` are a positive pair: `offset` is the global index of the
    block's first row less that of its first column.

    >>> [(t.rows.start, t.cols.start, t.diagonal) for t in tiles(2, 4, 2, 2, offset=2)]
    [(0, 0, 2), (0, 2, 0)]
    """
    for row in range(0, num_rows, tile_rows):
        rows = slice(row, min(row + tile_rows, num_rows))
        for col in range(0, num_cols, tile_cols):
            yield Tile(rows, slice(col, min(col + tile_cols, num_cols)), row + offset - col)
