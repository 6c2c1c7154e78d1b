"""Partitions and tiles are integers: every property is checked without a process or a tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.partition import Diagonal, Partition, Tile, tiles

counts = st.lists(st.integers(0, 50), min_size=1, max_size=9).map(tuple)


@given(counts)
def test_ranks_own_consecutive_rows_without_gap_or_overlap(counts):
    partition = Partition(counts)
    rows = [row for rank in range(len(counts)) for row in range(10**6)[partition.rows(rank)]]
    assert rows == list(range(partition.total))
    assert [partition.rows(rank).start for rank in range(len(counts))] == list(partition.offsets)


@given(st.integers(0, 1000), st.integers(1, 20))
def test_even_split_gives_the_remainder_to_the_first(total, parts):
    split = Partition.even(total, parts).counts
    assert sum(split) == total
    assert split == tuple(total // parts + (part < total % parts) for part in range(parts))


@given(first_row=st.integers(0, 5), rows=st.integers(0, 12), cols=st.integers(0, 12), side=st.integers(1, 5))
def test_tiles_cover_every_entry_once(first_row, rows, cols, side):
    seen = []
    for tile in tiles(slice(first_row, first_row + rows), slice(7, 7 + cols), side):
        assert max(tile.shape) <= side
        seen += _entries(tile)
    assert sorted(seen) == [(i, j) for i in range(first_row, first_row + rows) for j in range(7, 7 + cols)]


@given(rows=st.integers(0, 14), offset=st.integers(0, 9), side=st.integers(1, 5))
def test_a_triangle_and_its_mirror_image_cover_every_entry_once(rows, offset, side):
    seen = []
    for tile in tiles(slice(0, rows), slice(offset, offset + rows), side, triangle=True):
        entries = [(i, j - offset) for i, j in _entries(tile)]
        mirrored = [(j, i) for i, j in entries]
        assert (sorted(entries) == sorted(mirrored)) == tile.self_transposed
        seen += entries if tile.self_transposed else entries + mirrored
    assert sorted(seen) == [(i, j) for i in range(rows) for j in range(rows)]


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(1, 5))
def test_tiles_find_every_entry_of_a_diagonal_once(row, col, length, side):
    diagonal, seen = Diagonal(row, col, length), []
    for tile in tiles(slice(0, 18), slice(0, 18), side):
        i, j, inside = diagonal.within(tile)
        seen += [(tile.rows.start + i + k, tile.cols.start + j + k) for k in range(inside)]
    assert sorted(seen) == [(row + k, col + k) for k in range(length)]


def _entries(tile):
    return [(i, j) for i in range(100)[tile.rows] for j in range(100)[tile.cols]]


def test_invalid_partitions_and_tiles_raise():
    nan = float("nan")
    for bad in ((), (3, -1), (nan,), (1.5,), (True,), (None,), "12"):
        with pytest.raises(ValueError, match=r"partition needs|counts must be a list or tuple"):
            Partition(bad)
    for rank in (-1, 2, 9, True, 0.0, 10**400):
        with pytest.raises(ValueError, match="rank must be an integer from 0 to 1, a rank of this partition; got"):
            Partition((3, 2)).rows(rank)
    for total, parts in ((3, 0), (-1, 2), (3, 1.0), (3, True), (nan, 2), (3, 10**12)):
        with pytest.raises(ValueError, match=r"parts must be an integer|total must be an integer"):
            Partition.even(total, parts)
    for wrong in (slice(0, -1), slice(0, None), slice(0, 4, 2), (0, 4), slice(0.0, 4)):
        with pytest.raises(ValueError, match=r"rows must be a slice\(start, stop\)"):
            tiles(wrong, slice(0, 4), 2)
        with pytest.raises(ValueError, match=r"cols must be a slice\(start, stop\)"):
            Tile(slice(0, 2), wrong)
    with pytest.raises(ValueError, match="side must be a positive integer"):
        tiles(slice(0, 4), slice(0, 4), 0)
    with pytest.raises(ValueError, match="length must be an integer of at least 0"):
        Diagonal(0, 0, -1)
    with pytest.raises(ValueError, match="tile must be a Tile"):
        Diagonal(0, 0, 1).within((0, 1))
