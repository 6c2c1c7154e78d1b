"""Parts of a sweep, without ranks: budgets, kept tiles, pairs, and the schedule of blocks in integers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wholebatch as wb
from wholebatch.exchange import num_entries
from wholebatch.exchange.schedule import full, half
from wholebatch.partition import Diagonal, Partition, Tile, tiles
from wholebatch.sweep import Block, Diagonals, Driver, EqualIds, KeptTiles, Pairs, fit, smallest_budget

counts = st.lists(st.integers(0, 9), min_size=1, max_size=9).map(tuple)


@given(counts)
def test_a_full_schedule_meets_every_pair_once(rows):
    columns = Partition(rows)
    for rank, local in enumerate(rows):
        visits = full(local, columns, rank)
        assert [visit.source for visit in visits] == [(rank - step) % len(rows) for step in range(len(rows))]
        assert all(visit.rows == slice(0, local) for visit in visits)


@given(counts, st.integers(1, 4))
def test_half_a_schedule_and_its_mirror_image_meet_every_pair_once(rows, side):
    columns = Partition(rows)
    seen = []
    for rank in range(len(rows)):
        visits = half(columns, rank)
        computed = 0
        for visit in visits:
            first = columns.offsets[visit.source]
            cols = slice(first + visit.cols.start, first + visit.cols.stop)
            for tile in tiles(visit.rows, cols, side, triangle=visit.triangle):
                entries = [(columns.offsets[rank] + i, j) for i in range(100)[tile.rows] for j in range(100)[tile.cols]]
                seen += entries if tile.self_transposed else entries + [(j, i) for i, j in entries]
                computed += len(entries)
        assert computed <= num_entries(visits, side)
    total = columns.total
    assert sorted(seen) == [(i, j) for i in range(total) for j in range(total)]


@given(st.integers(2, 12), st.integers(1, 40))
def test_half_a_schedule_is_balanced(size, rows):
    work = [num_entries(half(Partition((rows,) * size), rank), 1) for rank in range(size)]
    assert max(work) - min(work) <= rows


@given(
    st.integers(8, 2**40), st.integers(1, 2**34), st.integers(1, 2000), st.sampled_from([torch.float32, torch.float64])
)
def test_a_budget_is_kept(memory, entries, side, dtype):
    budget = fit(memory, entries=entries, side=side, dtype=dtype)
    assert 1 <= budget.side <= side
    assert 0 <= budget.kept <= entries
    held = 2 * budget.side**2 * dtype.itemsize + budget.kept * budget.kept_dtype.itemsize
    assert held <= max(memory, 2 * dtype.itemsize)
    if dtype == torch.float64:
        assert budget.kept_dtype == torch.float64, "1e-10 leaves no room for rounding"


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_the_smallest_budget_suffices_and_ends(rows, cols):
    budget = fit(smallest_budget(rows, cols, 8), entries=rows * cols, side=768, dtype=torch.float32)
    assert budget.side == 32 or rows * cols / budget.side**2 <= 2**16


def test_named_budgets_keep_all_or_nothing():
    assert fit("flat", entries=9, side=4, dtype=torch.float32).kept == 0
    assert fit("auto", entries=17, side=4, dtype=torch.float32).kept == 0
    assert fit("auto", entries=16, side=4, dtype=torch.float32).kept == 16


def test_kept_tiles_come_back_in_order_until_one_did_not_fit():
    first, second, third = torch.ones(2, 3), 2 * torch.ones(3, 3), 3 * torch.ones(1, 1)
    kept = KeptTiles(torch.empty(8))
    for tile in (first, second, third):
        kept.keep(tile)
    again = KeptTiles(kept.buffer)
    assert torch.equal(again.next((2, 3)), first)
    assert again.next((3, 3)) is None
    assert again.next((1, 1)) is None, "later tiles would be taken for others"


def test_pairs_of_a_tile_are_those_of_the_whole_matrix():
    pairs = Pairs(positive=Diagonals(Diagonal(0, 5, 4)), excluded=Diagonals(Diagonal(0, 4, 4)))
    whole = torch.arange(40.0).view(4, 10)
    seen = []
    for tile in tiles(slice(0, 4), slice(0, 10), 3):
        at = pairs.positive.within(tile, torch.device("cpu"))
        if at is not None:
            seen += whole[tile.rows, tile.cols][at].tolist()
    assert sorted(seen) == [5.0, 16.0, 27.0, 38.0]
    assert pairs.excluded.within(Tile(slice(0, 4), slice(9, 10)), torch.device("cpu")) is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 9), st.integers(1, 4))
def test_equal_ids_of_a_tile_are_those_of_the_whole_matrix(ids, first, side):
    """Each tile has the entries of the whole matrix, except those that are left out."""
    cols = torch.tensor(ids)
    first = min(first, len(ids))
    rows, itself = cols[first:], Diagonals(Diagonal(0, first, len(ids) - first))
    entries = EqualIds(rows, cols, but=itself)
    seen = []
    for tile in tiles(slice(0, len(rows)), slice(0, len(cols)), side):
        at = entries.within(tile, torch.device("cpu"))
        if at is not None:
            seen += [
                (tile.rows.start + i, tile.cols.start + j) for i, j in zip(*map(torch.Tensor.tolist, at), strict=True)
            ]
    dense = (rows[:, None] == cols) & ~(torch.arange(first, len(ids))[:, None] == torch.arange(len(ids)))
    assert sorted(seen) == [tuple(entry) for entry in dense.nonzero().tolist()]


def test_nothing_is_allocated_after_the_first_tile():
    """A sweep uses the same buffers for every tile."""
    driver = Driver(torch.randn(50, 4), 2.0, side=16)
    block = Block(torch.randn(70, 4), slice(0, 70), slice(0, 50))
    places = {driver.logits(tile, x, y).data_ptr() for tile, x, y in driver.tiles(block)}
    assert len(places) == 1


@pytest.mark.parametrize("name", ["CLIPLoss", "InfoNCELoss", "NTXentLoss", "SigLIPLoss", "SupConLoss", "CircleLoss"])
def test_modules_show_their_settings(name):
    text = repr(getattr(wb, name)(exchange="ring", memory=10**6, sync=None))
    assert "exchange='ring'" in text
    assert "memory=1000000" in text
    assert "sync=None" in text
