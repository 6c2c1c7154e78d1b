"""Partitions and tiles are integers: every property is checked without a process or a tensor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wholebatch.partition import Partition, tiles

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


@given(
    num_rows=st.integers(0, 12),
    num_cols=st.integers(0, 12),
    tile_rows=st.integers(1, 5),
    tile_cols=st.integers(1, 5),
    offset=st.integers(0, 12),
)
def test_tiles_cover_every_entry_once_and_know_their_positives(num_rows, num_cols, tile_rows, tile_cols, offset):
    seen, positives = [], []
    for tile in tiles(num_rows, num_cols, tile_rows, tile_cols, offset=offset):
        entries = [(i, j) for i in range(num_rows)[tile.rows] for j in range(num_cols)[tile.cols]]
        inside = [
            (tile.rows.start + i, tile.cols.start + i + tile.diagonal)
            for i in range(tile.shape[0])
            if 0 <= i + tile.diagonal < tile.shape[1]
        ]
        assert tile.has_positives == bool(inside)
        seen += entries
        positives += inside
    assert sorted(seen) == [(i, j) for i in range(num_rows) for j in range(num_cols)]
    assert sorted(positives) == [(i, i + offset) for i in range(num_rows) if i + offset < num_cols]


def test_nonsense_is_refused():
    for bad in ((), (3, -1)):
        with pytest.raises(ValueError, match="partition needs"):
            Partition(bad)
    with pytest.raises(ValueError, match="parts >= 1"):
        Partition.even(3, 0)
