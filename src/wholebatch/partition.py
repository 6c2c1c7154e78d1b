"""Which rank owns which rows, and the tiles that cover a matrix: frozen integers, no tensors, no processes.

The global batch is the concatenation of the ranks' rows, rank 0 first. Everything that depends on this order (slices,
offsets, the positions of the positive pairs, the tiles of a sweep) is computed here, from the row counts alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ._base.settings import check_count, check_flag, check_instance, check_integer, check_sequence, shown

__all__ = ["Diagonal", "Partition", "Ragged", "Tile", "tiles"]

_MOST_PARTS = 2**20  # more ranks than any group has; a larger number is a mistake, and would fill the memory


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
        counts = check_sequence("counts", self.counts, "numbers of rows, one for each rank")
        plain = set(map(type, counts)) <= {int}  # as fast for thousands of ranks as for two
        whole = plain or all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
        if not counts or not whole or min(counts) < 0:
            raise ValueError(f"a partition needs at least one count, each an integer >= 0; got {shown(self.counts)}")
        object.__setattr__(self, "counts", tuple(counts))

    @classmethod
    def even(cls, total: int, parts: int) -> Partition:
        """Split `total` rows as evenly as possible, the remainder going to the first parts.

        >>> Partition.even(10, 4).counts
        (3, 3, 2, 2)
        """
        check_integer("total", total, minimum=0, detail="rows of all ranks")
        check_integer("parts", parts, minimum=1, maximum=_MOST_PARTS, detail="ranks")
        quotient, remainder = divmod(total, parts)
        return cls(tuple(quotient + (part < remainder) for part in range(parts)))

    @cached_property
    def total(self) -> int:
        """The number of rows of the global batch, B."""
        return sum(self.counts)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The global index of each rank's first row."""
        return tuple(accumulate(self.counts[:-1], initial=0))

    def rows(self, rank: int) -> slice:
        """Return the global rows that `rank` owns."""
        check_integer("rank", rank, minimum=0, maximum=len(self.counts) - 1, detail="a rank of this partition")
        start = sum(self.counts[:rank])
        return slice(start, start + self.counts[rank])


@dataclass(frozen=True)
class Ragged:
    """Items that consist of several vectors each: item k of all ranks has the vectors [starts[k], starts[k + 1]).

    Args:
        items: the items that each rank holds.
        lengths: the number of vectors of each item, rank 0's items first.

    >>> documents = Ragged(Partition((2, 1)), (3, 1, 2))
    >>> documents.vectors.counts, documents.of(slice(1, 3))
    ((4, 2), slice(3, 6, None))
    """

    items: Partition
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        check_instance("items", self.items, Partition, "a Partition")
        lengths = check_sequence("lengths", self.lengths, "numbers of vectors, one for each item")
        if len(lengths) != self.items.total:
            raise ValueError(f"lengths must have one entry for each of {self.items.total} items, got {len(lengths)}")
        if not set(map(type, lengths)) <= {int} or min(lengths, default=0) < 0:
            raise ValueError(f"lengths must be integers >= 0, the vectors of each item; got {shown(self.lengths)}")
        object.__setattr__(self, "lengths", tuple(lengths))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of each item's first vector, and after the last item their number."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def vectors(self) -> Partition:
        """The vectors that each rank holds."""
        spans = [self.of(self.items.rows(rank)) for rank in range(len(self.items.counts))]
        return Partition(tuple(span.stop - span.start for span in spans))

    def of(self, items: slice) -> slice:
        """Return the vectors of consecutive items."""
        _check_range("items", items)
        if not items.start <= items.stop <= self.items.total:
            raise ValueError(f"items must be some of {self.items.total}, got {shown(items)}")
        return slice(self.starts[items.start], self.starts[items.stop])

    def local(self, rank: int) -> Ragged:
        """Return the items of one rank alone."""
        items = self.items.rows(rank)
        if len(self.items.counts) == 1:
            return self
        return Ragged(Partition((items.stop - items.start,)), self.lengths[items])


@dataclass(frozen=True)
class Tile:
    """A rectangle of the similarity matrix: local rows x global columns.

    Args:
        rows: rows of this rank.
        cols: columns of the global batch.
        self_transposed: whether the tile of a symmetric matrix is its own transpose.
    """

    rows: slice
    cols: slice
    self_transposed: bool = False

    def __post_init__(self) -> None:
        _check_range("rows", self.rows)
        _check_range("cols", self.cols)
        check_flag("self_transposed", self.self_transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """(number of rows, number of columns)."""
        return self.rows.stop - self.rows.start, self.cols.stop - self.cols.start


def tiles(rows: slice, cols: slice, side: int, *, triangle: bool = False) -> Iterator[Tile]:
    """Cut rows x cols into tiles of at most side x side, row by row.

    Args:
        rows: the rows to cut.
        cols: the columns to cut.
        side: rows and columns of a tile, at most.
        triangle: the matrix is square and symmetric, and its columns are its rows: the tiles below the diagonal, mirror
            images of those above, are left out.

    >>> [(t.rows.start, t.cols.start) for t in tiles(slice(0, 2), slice(4, 8), 2)]
    [(0, 4), (0, 6)]
    >>> [(t.rows.start, t.cols.start, t.self_transposed) for t in tiles(slice(0, 4), slice(4, 8), 2, triangle=True)]
    [(0, 4, True), (0, 6, False), (2, 6, True)]
    """
    _check_range("rows", rows)
    _check_range("cols", cols)
    check_count("side", side, "rows and columns of a tile")
    check_flag("triangle", triangle)
    return _tiles(rows, cols, side, triangle=triangle)


def _tiles(rows: slice, cols: slice, side: int, *, triangle: bool) -> Iterator[Tile]:
    for row in range(rows.start, rows.stop, side):
        first_col = cols.start + (row - rows.start if triangle else 0)
        for col in range(first_col, cols.stop, side):
            yield Tile(
                slice(row, min(row + side, rows.stop)),
                slice(col, min(col + side, cols.stop)),
                self_transposed=triangle and col == first_col,
            )


@dataclass(frozen=True)
class Diagonal:
    """The entries (row + k, col + k), 0 <= k < length, of the similarity matrix.

    >>> Diagonal(row=0, col=2, length=3).within(Tile(slice(1, 4), slice(0, 4)))
    (0, 3, 1)
    """

    row: int
    col: int
    length: int

    def __post_init__(self) -> None:
        for name in ("row", "col", "length"):
            check_integer(name, getattr(self, name), minimum=0)

    def within(self, tile: Tile) -> tuple[int, int, int]:
        """Return (row in the tile, column in the tile) where the diagonal enters it, and its entries in the tile."""
        check_instance("tile", tile, Tile, "a Tile")
        first = max(0, tile.rows.start - self.row, tile.cols.start - self.col)
        last = min(self.length, tile.rows.stop - self.row, tile.cols.stop - self.col)
        return self.row + first - tile.rows.start, self.col + first - tile.cols.start, max(0, last - first)


def _check_range(name: str, rows: object) -> None:
    """Raise ValueError unless rows is a slice with a start and a stop, neither of them negative."""
    good = isinstance(rows, slice) and type(rows.start) is type(rows.stop) is int and rows.start >= 0 <= rows.stop
    if not good or rows.step not in (None, 1):  # type: ignore[attr-defined]
        raise ValueError(f"{name} must be a slice(start, stop) with 0 <= start, stop; got {shown(rows)}")
