"""The order in which a rank visits the columns of all ranks, as frozen integers.

Rank r visits the blocks r, r - 1, r - 2, ... (modulo W), in the order in which they arrive in a ring.

If S is symmetric (Y is X), half of it suffices. Each rank computes the upper triangle of its local block. The block of
ranks r and q is the transpose of that of q and r, so one of the two computes it: rank r takes the (W - 1) / 2 ranks
before it. If W is even, ranks on opposite sides of the ring share a block, and each takes half of the rows of the
lower rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.transport import MOST_PARTS
from ..partition import Partition


@dataclass(frozen=True)
class Visit:
    """The columns of one rank, and the local rows to multiply them with."""

    source: int  # the rank of the columns
    cols: slice  # among that rank's columns
    rows: slice  # among the local rows
    triangle: bool = False


def full(rows: int, columns: Partition, rank: int) -> tuple[Visit, ...]:
    """Return the visits in which all local rows meet all columns.

    >>> [visit.source for visit in full(4, Partition((4, 4, 4)), rank=1)]
    [1, 0, 2]
    """
    size = len(columns.counts)
    sources = [(rank - step) % size for step in range(size)]
    return tuple(Visit(source, slice(0, columns.counts[source]), slice(0, rows)) for source in sources)


def half(columns: Partition, rank: int) -> tuple[Visit, ...]:
    """Return the visits of a rank's part of a symmetric matrix, whose rows are its columns.

    >>> [(visit.source, visit.rows, visit.cols) for visit in half(Partition((3, 5)), rank=0)]
    [(0, slice(0, 3, None), slice(0, 3, None)), (1, slice(0, 2, None), slice(0, 5, None))]
    >>> [(visit.source, visit.rows, visit.cols) for visit in half(Partition((3, 5)), rank=1)]
    [(1, slice(0, 5, None), slice(0, 5, None)), (0, slice(0, 5, None), slice(2, 3, None))]
    """
    counts, size = columns.counts, len(columns.counts)
    local = slice(0, counts[rank])
    visits = [Visit(rank, local, local, triangle=True)]
    for step in range(1, size // 2 + 1):
        source = (rank - step) % size
        whole = slice(0, counts[source])
        if 2 * step < size:
            visits.append(Visit(source, whole, local))
        elif rank < source:
            visits.append(Visit(source, whole, slice(0, _upper_half(counts[rank]))))
        else:
            visits.append(Visit(source, slice(_upper_half(counts[source]), counts[source]), local))
    return tuple(visits)


def chunks(columns: Partition, least: int) -> tuple[range, ...]:
    """Return ranges of ranks with at least `least` columns each; the last has the rest. On more than 8 ranks, only one.

    >>> chunks(Partition((3, 3, 0, 3, 4)), 5)
    (range(0, 2), range(2, 5))
    >>> chunks(Partition((0, 0)), 0)  # an empty queue of keys
    (range(0, 2),)
    >>> chunks(Partition((3,) * 9), 5)
    (range(0, 9),)
    """
    least, ranges, first, size = max(1, least), list[range](), 0, len(columns.counts)
    for rank in range(size if size <= MOST_PARTS else 0):
        if sum(columns.counts[first : rank + 1]) >= least and sum(columns.counts[rank + 1 :]) >= least:
            ranges.append(range(first, rank + 1))
            first = rank + 1
    return (*ranges, range(first, size))


def _upper_half(rows: int) -> int:
    return (rows + 1) // 2


def num_entries(visits: tuple[Visit, ...], side: int) -> int:
    """Return the largest number of entries of S that the visits compute, in tiles of side x side."""
    total = 0
    for visit in visits:
        rows, cols = (cut.stop - cut.start for cut in (visit.rows, visit.cols))
        total += min(rows * cols, rows * (rows + side) // 2) if visit.triangle else rows * cols
    return total
