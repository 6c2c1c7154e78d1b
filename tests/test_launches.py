"""The parts of S that launches of kernels compute: each entry once, in few launches, in the memory that is planned."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wholebatch.exchange.schedule import chunks
from wholebatch.kernels import blocks
from wholebatch.partition import Diagonal, Partition
from wholebatch.sweep import (
    Block,
    Diagonals,
    Driver,
    KernelSigmoidSweep,
    KernelSoftmaxSweep,
    Pairs,
    Products,
    Selection,
    SoftmaxSweep,
    Sums,
    Weights,
    columns_of_tiles,
    default_side,
)
from wholebatch.sweep.launches import launches, shape_of_tiles

META, GPU = torch.device("meta"), torch.device("cuda", 0)


def block_of(rows, cols, triangle=False, first_row=0, first_col=0):
    at = slice(first_col, first_col + cols), slice(first_row, first_row + rows)
    return Block(torch.empty(cols, 0), *at, triangle)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 900), st.integers(1, 40), st.booleans())
def test_each_entry_is_in_one_launch(rows, cols, entries, strip, triangle):
    """In a triangle, an entry below the diagonal is in a square on the diagonal, or its mirror image is in a tile."""
    cols = rows if triangle else cols
    seen = torch.zeros(rows, cols, dtype=torch.int64)
    for tile in launches(block_of(rows, cols, triangle, 3, 5), entries, strip):
        assert 0 < tile.shape[0] * tile.shape[1] <= entries
        here = seen[tile.rows.start - 3 : tile.rows.stop - 3, tile.cols.start - 5 : tile.cols.stop - 5]
        here += 1
        assert not tile.self_transposed or tile.shape[0] == tile.shape[1] <= strip
        if triangle and not tile.self_transposed:
            seen.T[tile.rows.start - 3 : tile.rows.stop - 3, tile.cols.start - 5 : tile.cols.stop - 5] += 1
    assert (seen == 1).all()


@given(st.integers(1, 2**21), st.integers(1, 2**21), st.integers(1, 2**27))
def test_tiles_are_as_large_as_memory_allows(rows, cols, entries):
    high, wide = shape_of_tiles(rows, cols, entries)
    assert 0 < high <= rows
    assert 0 < wide <= cols
    assert high * wide <= entries
    tiles = -(-rows // high) * -(-cols // wide)
    if min(rows, cols, entries) >= 2**14:  # else rounding to whole programs is coarse
        assert tiles <= 3 * rows * cols / entries + 4


class OfBothPasses:
    """The tiles that kernels are started for, and the bytes of each."""

    def __init__(self, monkeypatch, rows, widths, *, side=4096):
        self.of_sums, self.of_gradients = [], []
        self.partial_bytes = []
        monkeypatch.setattr("wholebatch.kernels.launch.run", self.record)
        monkeypatch.setattr("wholebatch.kernels.launch.capability", lambda device: (9, 0))
        monkeypatch.setattr("wholebatch.sweep.products.Products._multiply", lambda *given, **options: None)
        columns, dim = sum(widths), 512
        x, y = (torch.empty(n, dim, dtype=torch.bfloat16, device=META) for n in (rows, columns))
        pairs = Pairs(Diagonals(Diagonal(0, 0, min(rows, columns))))
        sweep = KernelSoftmaxSweep(Driver(x, 14.3, side=side), Selection(pairs), columns)
        of_rows, of_cols = (torch.empty(n, dtype=torch.float64, device=META) for n in (rows, columns))
        u, v = (torch.empty(n, dim, device=META) for n in (rows, columns))
        ends = [sum(widths[:at]) for at in range(len(widths) + 1)]
        for first, stop in pairwise(ends):
            at = slice(first, stop)
            block = Block(y[at], at, slice(0, rows))
            fields = {"sum": of_rows, "target": of_rows}
            sweep.sums(block, Sums(3.0, fields), Sums(3.0, {"sum": of_cols[at]}))
            sweep.gradients(
                block, Weights(3.0, of_rows, of_rows, None), Weights(3.0, of_cols[at], None, None), u, v[at]
            )

    def record(self, kernel, programs, x, y, numbers, *tensors, **constants):
        tile = len(x.tensor), len(y.tensor)
        if kernel.__name__ == "tile_sums":
            self.of_sums.append(tile)
            self.partial_bytes.append(sum(part.numel() for part in tensors[:2]) * 4)
        else:
            self.of_gradients.append(tile)


def test_launches_of_one_rank_of_eight(monkeypatch):
    """4096 rows against 32768 columns, which arrive in two transfers: 2 + 2 launches, once 8 + 8."""
    columns = Partition((4096,) * 8)
    least = columns_of_tiles(default_side(GPU), torch.bfloat16)
    widths = [4096 * len(ranks) for ranks in chunks(columns, least)]
    found = OfBothPasses(monkeypatch, 4096, widths)
    assert found.of_sums == found.of_gradients == [(4096, 16384)] * 2
    assert len(OfBothPasses(monkeypatch, 4096, [4096] * 8).of_sums) == 8  # with a transfer for each rank


@pytest.mark.parametrize(
    ("rows", "cols"), [(4096, 32768), (32768, 32768), (1_250_000, 4096), (256, 2**20), (2**17, 2**17), (300, 500)]
)
def test_memory_is_that_of_two_tiles_of_plain_pytorch(monkeypatch, rows, cols):
    planned = 2 * 4 * min(4096, rows) * min(4096, cols)
    found = OfBothPasses(monkeypatch, rows, [cols])
    assert max(high * wide * 2 for high, wide in found.of_gradients) <= planned
    assert max(found.partial_bytes) <= planned
    assert sum(high * wide for high, wide in found.of_sums) == rows * cols
    assert len(found.of_sums) <= len(found.of_gradients)
    if cols == 32768 and rows == 4096:
        assert len(found.of_sums) == 1


class Operations(TorchDispatchMode):
    """The operations that compute something, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return func(*args, **kwargs or {})


def operations_of_gradients(monkeypatch, sweep, side):
    """Return the operations, launches and products of a sweep of dS with tiles of this side, in bfloat16 on a GPU."""
    products, launched = [], []
    monkeypatch.setattr("wholebatch.kernels.launch.run", lambda *of, **more: launched.append(of))
    monkeypatch.setattr("wholebatch.kernels.launch.capability", lambda device: (9, 0))
    n, dim = 1024, 64
    x, y = (torch.empty(n, dim, dtype=torch.bfloat16, device=META) for _ in range(2))
    u, v = (torch.empty(n, dim, device=META) for _ in range(2))
    driver = Driver(x, 14.3, -5.0, side=side, products=Products("bfloat16", units=True))
    pairs, weights = Pairs(Diagonals(Diagonal(0, 0, n))), torch.empty(n, dtype=torch.float64, device=META)
    block = Block(y, slice(0, n), slice(0, n))
    monkeypatch.setattr("wholebatch.sweep.products.Products.multiply", lambda self, a, b, out, **of: products.append(a))
    if sweep == "softmax":
        softmax, side = KernelSoftmaxSweep(driver, Selection(pairs), n), Weights(3.0, weights, weights, None)
        with Operations() as made:
            softmax.gradients(block, side, side, u, v)
    else:
        sigmoid = KernelSigmoidSweep(driver, pairs, torch.float64, n, weights)
        with Operations() as made:
            sigmoid.block(block, u, v, bias=True)
    return made.names, launched, products


@pytest.mark.parametrize(("sweep", "sums"), [("softmax", 0), ("sigmoid", 3)])
def test_each_further_tile_of_ds_is_a_launch_and_two_products(monkeypatch, sweep, sums):
    """No cast, no division, no index. The sigmoid sweep also adds up the tile's losses and its gradient of the bias."""
    few, one, _ = operations_of_gradients(monkeypatch, sweep, 1024)
    many, several, products = operations_of_gradients(monkeypatch, sweep, 256)
    tiles = len(several)
    assert len(one) == 1
    assert tiles >= 4
    assert len(products) == 2 * tiles
    assert len(many) - len(few) <= sums * (tiles - 1)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_two_programs_fit_on_an_sm_where_registers_suffice(capability):
    """Programs of 4 warps are two on an SM with all registers that a thread can have."""
    for kernel, parts in (("tile_sums", 1), ("tile_gradient", 2), ("tile_sigmoid", 2)):
        form = blocks.Form(kernel, capability, torch.bfloat16, 256)
        found = blocks.blocks_of(form, boxes=capability >= (9, 0))
        if capability == (9, 0):
            assert (found.rows, found.cols, found.warps, found.parts) == (128, 128, 4, parts)
            assert 65536 // (found.warps * 32 * 255) == 2
        else:
            assert found.warps == 8


class Traffic(TorchDispatchMode):
    """The bytes that operations read and write in tensors of `entries` numbers, as on a GPU, where each is a launch."""

    def __init__(self, entries):
        super().__init__()
        self.entries, self.bytes = entries, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view or func.namespace != "aten" or func.__name__.startswith(("empty", "new_empty", "index")):
            return result
        read = dict(enumerate(args)) | kwargs
        read.pop("out", None)
        if func.__name__.startswith("copy_") or (func.__name__.startswith("addmm") and not kwargs.get("beta", 1)):
            read.pop(0)  # overwritten
        self.bytes += sum(x.nbytes for x in (*tree_leaves(read), result) if self.is_a_tile(x))
        return result

    def is_a_tile(self, x):
        return isinstance(x, torch.Tensor) and x.numel() == self.entries


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch cannot find the shape of a sum with a product of halves")
@pytest.mark.parametrize(("shift", "of_sums", "of_gradients"), [(0.0, 20, 30), (25.0, 28, 38)])
def test_bytes_that_plain_pytorch_moves_for_each_entry_of_s(shift, of_sums, of_gradients, monkeypatch):
    """Products of bfloat16 features as on a GPU: 50 bytes; 66 with a shift, which CLIP has at a scale of 100."""
    monkeypatch.setattr("wholebatch.sweep.products._has_products_of_halves", lambda a, out: a.dtype != out.dtype)
    n, dim = 1024, 64
    x, y = (torch.empty(n, dim, dtype=torch.bfloat16, device=META) for _ in range(2))
    u, v = (torch.empty(n, dim, device=META) for _ in range(2))
    weights = torch.empty(n, dtype=torch.float64, device=META)
    driver = Driver(x, 14.3, side=n, products=Products("bfloat16", units=True))
    sweep, block = SoftmaxSweep(driver, Selection(Pairs(Diagonals(Diagonal(0, 0, n))))), block_of(n, n)
    block = Block(y, block.cols, block.rows)
    with Traffic(n * n) as traffic:
        sweep.sums(block, Sums(shift, {"sum": weights, "target": weights}), Sums(shift, {"sum": weights}))
    assert traffic.bytes == of_sums * n * n
    with Traffic(n * n) as traffic:
        sweep.gradients(block, Weights(shift, weights, weights, None), Weights(shift, weights, None, None), u, v)
    assert traffic.bytes == of_gradients * n * n
