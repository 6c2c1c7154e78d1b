"""The results of kernels in Triton, in the interpreter where there is no GPU."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import re
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import product

import numpy as np
import pytest
import tensor_cores
import torch
from kernel_losses import learns_its_scale, losses
from lowered_losses import LOSSES as LOWERED
from lowered_losses import batch_of, multi_similarity
from pair_losses import gradients as of_batch
from precision_losses import LOSSES, value_and_gradients
from torch.nn.functional import cross_entropy, normalize

import wholebatch as wb
from wholebatch import kernels
from wholebatch.exchange import USED_EXCHANGES
from wholebatch.heads.angles import target_angles
from wholebatch.heads.rows import take_rows
from wholebatch.partition import Diagonal, Tile
from wholebatch.sweep import (
    NONE,
    Block,
    Diagonals,
    Driver,
    EqualIds,
    KernelSoftmaxSweep,
    NamedRows,
    Pairs,
    Selection,
    SoftmaxSweep,
    Sums,
    Union,
    Weights,
)
from wholebatch.sweep.members import members
from wholebatch.testing import run_ranks

triton = pytest.importorskip("triton")
TRITON, NUMPY = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
if not torch.cuda.is_available() and TRITON < (3, 7) and NUMPY >= (2, 4):
    pytest.skip(
        "Triton 3.6's interpreter takes one-element arrays for numbers, which NumPy 2.4 refuses",
        allow_module_level=True,
    )
NAMES = tuple(losses(*[torch.zeros(1, 1)] * 2, torch.zeros(1))[0])
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHIFT = kernels.exact(3.0)
NAN = float("nan")
SINGLE = 2e-6 if DEVICE.type == "cpu" else 1e-5  # float32 on tensor cores is three products
# Errors relative to float64; dS is rounded to the features' dtype (truncated in the interpreter).
CLOSE = {torch.float32: (SINGLE, SINGLE), torch.bfloat16: (SINGLE, 6e-3)}


def poisoned(rows, dim, dtype):
    """Return rows of unit length surrounded by NaN, so that reading beyond them shows."""
    around = torch.full((rows + 3, dim + 5), NAN, dtype=dtype, device=DEVICE)
    around[1 : rows + 1, :dim] = normalize(torch.randn(rows, dim, dtype=torch.float64), dim=1).to(DEVICE, dtype)
    return around[1 : rows + 1, :dim]


def pairs_of(kind, rows, cols):
    ids_of_rows, ids_of_cols = (torch.randint(2**40, 2**40 + 9, (n,), device=DEVICE) for n in (rows, cols))
    matching = Diagonals(Diagonal(0, 2, min(rows, cols - 2)))
    return {
        "pairs": Pairs(matching),
        "two views": Pairs(Diagonals(Diagonal(0, 5, 3), Diagonal(4, 1, 3)), Diagonals(Diagonal(0, 0, rows))),
        "ids": Pairs(EqualIds(ids_of_rows, ids_of_cols)),
        "ids excluded": Pairs(matching, EqualIds(ids_of_rows, ids_of_cols, but=matching)),
        "both": Pairs(Union(matching, EqualIds(ids_of_rows, ids_of_cols, but=matching)), Diagonals(Diagonal(1, 0, 4))),
        "none": Pairs(),
    }[kind]


FIELDS = ("sum", "target", "logits", "count")


def swept(kind, x, y, selection, *, side, sides=("rows", "cols"), triangle=False, uniform=False, scale=14.3, **of):
    """Return sums and products of one block, and the gradient of offsets."""
    driver = Driver(x, scale, side=side, **of)

    def sweep():
        return kind(driver, selection) if kind is SoftmaxSweep else kind(driver, selection, len(y))

    block = Block(y, slice(0, len(y)), slice(0, len(x)), triangle)
    zeros = {"dtype": torch.float64, "device": x.device}
    rows = Sums(SHIFT, {name: torch.zeros(len(x), **zeros) for name in FIELDS})
    cols = Sums(SHIFT, {name: torch.zeros(len(y), **zeros) for name in FIELDS})
    if triangle:
        cols = rows
    given = [rows if "rows" in sides else None, cols if "cols" in sides else None]
    sweep().sums(block, *given)
    generator = torch.Generator().manual_seed(1)
    weights = []
    for side_sums in given:
        if side_sums is None:
            weights.append(None)
            continue
        total = side_sums.fields["sum"]
        targets, logits = (-torch.rand(len(total), generator=generator, dtype=torch.float64) for _ in range(2))
        by_sum = torch.where(total > 0, 1 / total, 0.0)
        weights.append(Weights(SHIFT, by_sum, targets.to(x.device), logits.to(x.device) if uniform else None))
    accumulate = driver.dtype
    u, v = (torch.zeros(of.shape, dtype=accumulate, device=x.device) for of in (x, y))
    of_offsets = torch.zeros(len(x), dtype=accumulate, device=x.device)
    if triangle:
        weights[1] = weights[0]
    sweep().gradients(block, *weights, u, u if triangle else v, None if triangle else of_offsets)
    fields = [field for of in given if of is not None for field in of.fields.values()]
    return [found.double() for found in (*fields, of_offsets, u, v)]


def errors(found, true):
    """Return the relative errors of sums, and of products."""
    assert all(f.isfinite().all() for f in found)
    relative = [((f - t).norm() / t.norm().clamp(min=1e-3)).item() for f, t in zip(found, true, strict=True)]
    return max(relative[:-3]), max(relative[-3:])


@pytest.mark.parametrize("over", ["negatives", "all", "positives"])
@pytest.mark.parametrize("kind", ["pairs", "two views", "ids", "ids excluded", "both", "none"])
def test_sums_and_products(in_kernels, kind, over):
    """Compare float32, with 45 rows and 77 columns in two tiles per direction, with the same sweep in float64."""
    x, y = poisoned(45, 19, torch.float32), poisoned(77, 19, torch.float32)
    selection = Selection(pairs_of(kind, 45, 77), over)
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640)
    of_sums, of_products = errors(swept(KernelSoftmaxSweep, x, y, selection, side=30), true)
    assert of_sums < CLOSE[torch.float32][0]
    assert of_products < CLOSE[torch.float32][1]


@pytest.mark.parametrize("over", ["negatives", "all", "positives"])
@pytest.mark.parametrize("kind", ["pairs", "ids excluded", "both"])
def test_weights_of_candidates_logits(in_kernels, kind, over):
    """Label smoothing needs them."""
    x, y = poisoned(45, 19, torch.float32), poisoned(77, 19, torch.float32)
    selection = Selection(pairs_of(kind, 45, 77), over)
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640, uniform=True)
    assert max(errors(swept(KernelSoftmaxSweep, x, y, selection, side=30, uniform=True), true)) < SINGLE
    assert max(errors(swept(SoftmaxSweep, x.double(), y.double(), selection, side=640), true)) > 1e-2  # without


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("of", ["norms of rows", "norms of both", "offsets", "all"])
def test_rows_with_norms_and_offsets(in_kernels, of, dtype):
    """PartialFC has such rows: they are classes, and each column names its class."""
    x, y = poisoned(45, 19, dtype) * 3, poisoned(77, 19, dtype) / 2
    norms = {}
    if "offsets" not in of:
        norms["norms"] = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
    if of in ("norms of both", "all"):
        norms["col_norms"] = torch.linalg.vector_norm(y, dim=1, keepdim=True, dtype=torch.float64)
    offsets = torch.randn(45, device=DEVICE) if of in ("offsets", "all") else None
    local = torch.randint(-1, 45, (77, 2), device=DEVICE)
    local[:, 1].masked_fill_(local[:, 1] == local[:, 0], -1)
    selection = Selection(Pairs(excluded=NamedRows(local)), offsets=offsets)
    wide = replace(selection, offsets=None if offsets is None else offsets.double())
    true = swept(SoftmaxSweep, x.double(), y.double(), wide, side=640, **norms)
    single = {name: of.float() for name, of in norms.items()}
    of_sums, of_products = errors(swept(KernelSoftmaxSweep, x, y, selection, side=30, **single), true)
    assert of_sums < 2 * CLOSE[dtype][0]
    assert of_products < 2 * CLOSE[dtype][1]


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize(("rows", "cols", "dim"), [(1, 1, 1), (1, 70, 33), (64, 3, 8), (33, 65, 64)])
def test_awkward_sizes_are_exact(in_kernels, rows, cols, dim, dtype):
    x, y = poisoned(rows, dim, dtype), poisoned(cols, dim, dtype)
    selection = Selection(Pairs(Diagonals(Diagonal(0, 0, min(rows, cols)))), "all")
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640)
    for side, (of_sums, of_products) in (
        (side, errors(swept(KernelSoftmaxSweep, x, y, selection, side=side), true)) for side in (640, 11)
    ):
        assert of_sums < CLOSE[dtype][0], side
        assert of_products < CLOSE[dtype][1], side


@pytest.mark.parametrize("sides", [("rows",), ("cols",)])
def test_rows_or_columns_alone(in_kernels, sides):
    x, y = poisoned(40, 12, torch.float32), poisoned(50, 12, torch.float32)
    selection = Selection(pairs_of("pairs", 40, 50))
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640, sides=sides)
    assert max(errors(swept(KernelSoftmaxSweep, x, y, selection, side=20, sides=sides), true)) < SINGLE


def test_half_of_a_symmetric_matrix_is_enough(in_kernels):
    x = poisoned(50, 12, torch.float32)
    views = Pairs(Diagonals(Diagonal(0, 25, 25), Diagonal(25, 0, 25)), Diagonals(Diagonal(0, 0, 50)))
    true = swept(SoftmaxSweep, x.double(), x.double(), Selection(views), side=640, triangle=True)
    half = swept(KernelSoftmaxSweep, x, x, Selection(views), side=10, triangle=True)
    assert max(errors(half, true)) < SINGLE


@pytest.mark.parametrize("dtype", CLOSE)
def test_programs_compute_several_blocks(in_kernels, monkeypatch, dtype):
    """There are 9 x 7 blocks, ragged at both ends, and fewer programs where descriptors load features."""
    programs = []
    run = kernels.launch.run
    monkeypatch.setattr(kernels.launch, "run", lambda *of, **more: (programs.append(of[1]), run(*of, **more))[1])
    x, y = poisoned(271, 24, dtype), poisoned(401, 24, dtype)
    selection = Selection(pairs_of("two views", 271, 401), "all")
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640)
    of_sums, of_products = errors(swept(KernelSoftmaxSweep, x, y, selection, side=640), true)
    assert of_sums < CLOSE[dtype][0]
    assert of_products < CLOSE[dtype][1]
    if DEVICE.type == "cpu":
        assert {*programs} == ({63} if dtype == torch.float32 else {2 * kernels.launch.processors(DEVICE)})


def test_a_scale_is_read_from_the_device(in_kernels):
    x, y = poisoned(45, 24, torch.bfloat16), poisoned(77, 24, torch.bfloat16)
    scale = torch.tensor(14.3, dtype=torch.float64, device=DEVICE)
    for kind, over in product(("pairs", "ids"), ("negatives", "all")):
        selection = Selection(pairs_of(kind, 45, 77), over)
        expected = swept(KernelSoftmaxSweep, x, y, selection, side=30)
        found = swept(KernelSoftmaxSweep, x, y, selection, side=30, scale=scale)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        other = swept(KernelSoftmaxSweep, x, y, selection, side=30, scale=scale * 1.01)
        assert not torch.equal(other[0], expected[0])


@pytest.mark.parametrize(
    ("dtype", "dim", "kind", "boxes"),
    [
        (torch.bfloat16, 24, "in order", True),
        (torch.float16, 1000, "in order", True),
        (torch.bfloat16, 4096, "in order", True),
        (torch.bfloat16, 40, "columns first", True),  # copied
        (torch.bfloat16, 40, "rows not aligned", True),  # copied
        (torch.bfloat16, 40, "base not aligned", True),  # copied
        (torch.bfloat16, 3, "in order", False),
        (torch.bfloat16, 1, "in order", False),
        (torch.bfloat16, 20, "in order", False),
        (torch.float32, 24, "in order", False),
    ],
)
def test_descriptors_load_features_where_they_can(in_kernels, monkeypatch, dtype, dim, kind, boxes):
    """And they store dS, whose rows begin at multiples of 16 bytes whatever its number of columns. Others: pointers."""
    made = []
    run = kernels.launch.run

    def record(kernel, programs, *arguments, **constants):
        made.append([type(of) is kernels.launch.Box for of in arguments])
        run(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(kernels.launch, "run", record)
    x, y = (normalize(torch.randn(n, dim, device=DEVICE), dim=1).to(dtype) for n in (37, 51))
    if kind == "columns first":
        x, y = (z.T.contiguous().T for z in (x, y))
    elif kind == "rows not aligned":
        x, y = (torch.cat([z, z[:, :3]], dim=1)[:, :dim] for z in (x, y))
    elif kind == "base not aligned":
        x, y = (torch.cat([z.flatten()[:1], z.flatten()])[1:].view(z.shape) for z in (x, y))
    selection = Selection(pairs_of("pairs", 37, 51))
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640)
    of_sums, of_products = errors(swept(KernelSoftmaxSweep, x, y, selection, side=640), true)
    assert of_sums < 3 * CLOSE[torch.bfloat16][0]
    assert of_products < CLOSE[torch.bfloat16][1]
    of_sums, of_gradient = made
    assert of_sums[:2] == of_gradient[:2] == [boxes] * 2
    assert of_gradient[3] == boxes
    assert not any((*of_sums[2:], *of_gradient[4:]))


def test_descriptors_load_parts_of_whole_steps(in_kernels, monkeypatch):
    """Parts of 32 and 64 features are steps of the interpreter's blocks; those of 16 and 64 are not."""
    made = []
    run = kernels.launch.run

    def record(kernel, *of, **more):
        made.extend(boxes for name, boxes in more.items() if name == "BOXES")  # those of rows have none
        run(kernel, *of, **more)

    monkeypatch.setattr(kernels.launch, "run", record)
    x, y = (normalize(torch.randn(37, 72), dim=1).to(DEVICE, torch.bfloat16) for _ in range(2))
    for dims in ((32, 64), (16, 64)):
        found, expected = [], []
        for functions, cast, into in ((wb.functional, x.dtype, found), (wb.reference, torch.float64, expected)):
            leaves = [z.to(cast).requires_grad_() for z in (x, y)]
            more = {"kernel": "triton"} if into is found else {}
            loss = functions.matryoshka_loss(*leaves, logit_scale=14.3, dims=dims, **more)
            into += [loss.detach().double(), *(g.double() for g in torch.autograd.grad(loss, leaves))]
        for got, exact in zip(found, expected, strict=True):
            assert (got - exact).norm() < 1e-2 * exact.norm()
    half = len(made) // 2
    assert made == [True] * half + [False] * half


def test_older_cards_and_float32_have_pointers():
    form = kernels.blocks.Form("tile_sums", (9, 0), torch.bfloat16, 512)
    of_card = partial(kernels.launch._layout, processors=132, chosen=None, allows_tf32=False, simulated=False)
    found = of_card(form)
    assert found.boxes
    assert found.programs == 264
    older = of_card(form._replace(capability=(8, 9)))
    assert not older.boxes
    assert older.programs is None
    assert not of_card(form._replace(dtype=torch.float32)).boxes
    assert of_card(form._replace(kernel="tile_sums", features=768, many_rows=True)).programs == 132


def test_features_in_column_major_order(in_kernels):
    x, y = (normalize(torch.randn(12, n, device=DEVICE), dim=0).T for n in (40, 50))
    selection = Selection(pairs_of("pairs", 40, 50))
    true = swept(SoftmaxSweep, x.double(), y.double(), selection, side=640)
    assert max(errors(swept(KernelSoftmaxSweep, x, y, selection, side=20), true)) < SINGLE


def test_the_scale_of_sums_is_that_of_positives(in_kernels):
    """With separate rounding, log R - T would be off by 2e-6 at scale 100, where p = 1 and all else is exact."""
    x = torch.eye(40, device=DEVICE)
    for scale, wanted in ((100.0, 99.3), (1 / 0.07, 13.9), (50.0, 49.9)):
        shift = kernels.exact(wanted)
        assert abs(shift - wanted) < 5e-6
        driver = Driver(x, scale, side=640)
        rows = Sums(shift, {n: torch.zeros(40, dtype=torch.float64, device=DEVICE) for n in ("sum", "target")})
        selection = Selection(Pairs(Diagonals(Diagonal(0, 0, 40))), "positives")
        KernelSoftmaxSweep(driver, selection, 40).sums(Block(x, slice(0, 40), slice(0, 40)), rows, None)
        loss = shift + rows.fields["sum"].log() - rows.fields["target"]
        assert loss.abs().max() < 1e-12


@pytest.fixture
def in_kernels(monkeypatch):
    """Fail if plain PyTorch computes a tile, and fill memory with NaN before kernels write it."""
    logits, new_empty = Driver.logits, torch.Tensor.new_empty

    def only_in_float64(self, tile, x, y):
        assert x[0].dtype == torch.float64, "plain PyTorch computes a tile"
        return logits(self, tile, x, y)

    def nothing(self, *args, **more):
        made = new_empty(self, *args, **more)
        return made.fill_(NAN) if made.is_floating_point() else made

    if DEVICE.type == "cpu":
        tensor_cores.round_to_nearest(monkeypatch)
    monkeypatch.setattr(Driver, "logits", only_in_float64)
    monkeypatch.setattr(torch.Tensor, "new_empty", nothing)


def test_positives_are_not_rounded():
    """For trained features (p = 1 - 3e-4) dS is lost if its parts are rounded before they are added."""
    x = normalize(torch.randn(48, 64, device=DEVICE), dim=1).bfloat16()
    selection = Selection(Pairs(Diagonals(Diagonal(0, 0, 48))), "all")
    sweep = KernelSoftmaxSweep(Driver(x, 12.0, side=640), selection, 48)
    block = Block(x, slice(0, 48), slice(0, 48))
    exact = (12 * x.double() @ x.double().T).softmax(1)
    sums = Sums(SHIFT, {"sum": torch.zeros(48, dtype=torch.float64, device=DEVICE)})
    sweep.sums(block, sums, None)
    u = torch.zeros(48, 64, device=DEVICE)
    minus_one = -torch.ones(48, dtype=torch.float64, device=DEVICE)
    sweep.gradients(block, Weights(SHIFT, 1 / sums.fields["sum"], minus_one, None), None, u, None)
    true = (exact - torch.eye(48, device=DEVICE)) @ x.double()
    rounded_before = exact.bfloat16().double() @ x.double() - x.double()
    assert (u - true).norm() < 1e-2 * true.norm()
    assert (rounded_before - true).norm() > 0.5 * true.norm()


def test_the_same_bits_each_time():
    x, y = poisoned(70, 20, torch.float32), poisoned(90, 20, torch.float32)
    selection = Selection(pairs_of("pairs", 70, 90))
    one, other = (swept(KernelSoftmaxSweep, x, y, selection, side=40) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sets_equal_those_of_plain_pytorch():
    """The sets of a tile are compared entry by entry."""
    tile, rows, cols, cpu = Tile(slice(3, 30), slice(5, 60)), 40, 70, torch.device("cpu")
    sets = [entries for kind in ("pairs", "two views", "ids", "ids excluded", "both") for entries in
            (pairs_of(kind, rows, cols).positive, pairs_of(kind, rows, cols).excluded)]  # fmt: skip
    sets += [
        NamedRows(torch.randint(-1, rows, (cols,))),
        EqualIds(torch.arange(rows) % 7 - 2**50, torch.arange(cols) % 5 - 2**50),
    ]
    for entries in sets:
        expected = torch.zeros(tile.shape, dtype=torch.bool)
        at = entries.within(tile, DEVICE)
        if at is not None:
            expected[at[0].cpu(), at[1].cpu()] = True
        of = members(entries, cols, DEVICE).of_tile(tile)
        found = torch.zeros(tile.shape, dtype=torch.bool)
        for named in [] if of.named is None else of.named.cpu():
            found |= torch.arange(tile.shape[0])[:, None] == named - tile.rows.start
        if of.ids:
            equal = of.rows.cpu()[:, None] == of.cols.cpu()
            found = equal | found if of.ids == 1 else equal & ~found
        assert torch.equal(found, expected)
    assert members(NamedRows(torch.zeros(cols, 5, dtype=torch.int64)), cols, cpu) is None  # unsupported
    assert members(Union(Diagonals(Diagonal(0, 0, 1)), NONE), cols, cpu) is None


def test_named_rows_of_diagonals_are_made_once(monkeypatch):
    """For all calls of a form; diagonals without a common column are one row of names, one comparison."""
    views = (Diagonal(0, 30, 30), Diagonal(30, 0, 30))
    first = members(Diagonals(*views), 60, DEVICE)
    monkeypatch.setattr(torch, "full", None)  # a second call makes no tensor
    again = members(Diagonals(*views), 60, DEVICE)
    assert again.named is first.named
    assert first.named.tolist() == [[*range(30, 60), *range(30)]]
    monkeypatch.undo()
    crossed = members(Diagonals(*views, Diagonal(0, 0, 60)), 60, DEVICE)
    assert crossed.named.tolist() == [[*range(30, 60), *range(30)], [*range(60)]]


def test_the_polynomial_of_the_sigmoid():
    """Its relative error is that of a few roundings of float32, also for clear negatives, whose e is tiny."""
    sigmoid = importlib.import_module("wholebatch.kernels.tiles.sigmoid")
    source = inspect.getsource(sigmoid.log2_of_1_plus.fn)
    coefficients = [float(sign + of) for sign, of in re.findall(r"(?:([-+]) |[*(] ?)(\d\.\d+)", source)]
    assert len(coefficients) == 9
    e = torch.cat([torch.linspace(0, 1, 2**20)[1:], 2.0 ** -torch.arange(1, 120.0)])
    true = torch.log1p(e.double()) / math.log(2)

    def error(coefficients, dtype):
        series = torch.zeros_like(e, dtype=dtype)
        for of in coefficients:
            series = series * e + of
        return ((series * e).double() / true - 1).abs().max()

    assert error(coefficients, torch.float64) < 4e-8
    assert error(coefficients, torch.float32) < 4e-7
    fitted = [*map(float, np.polyfit(e.double().numpy(), (true / e).numpy(), 7))]
    assert error(fitted, torch.float64) > 1e-7  # one degree less


# Losses.


@pytest.mark.parametrize(("name", "dtype"), [*product(NAMES, CLOSE)])
def test_losses_are_exact(in_kernels, name, dtype):
    """Compare value and gradients with the reference in float64."""
    whole = [normalize(torch.randn(50, 24), dim=1).to(DEVICE, dtype) for _ in range(2)]
    ids = torch.randint(0, 30, (50,), device=DEVICE)

    def run(functions, cast, **more):
        leaves = [z.to(cast).requires_grad_() for z in whole]
        made, scale = losses(*leaves, ids)
        loss = made[name](functions, more)
        scales = [scale] if learns_its_scale(name) else []
        grads = torch.autograd.grad(loss, [*leaves[: 1 if name == "sup_con" else 2], *scales])
        return [loss.detach().double(), *(g.double() for g in grads)]

    true = run(wb.reference, torch.float64)
    found = run(wb.functional, dtype, kernel="triton", memory="flat")
    for got, exact in zip(found, true, strict=True):
        assert (got - exact).norm() < (1e-5 if dtype == torch.float32 else 5e-3) * exact.norm()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", [*LOWERED, "multi_similarity"])
def test_declared_losses_are_exact(in_kernels, name, dtype):
    """Terms that take the softmax sweep; those of multi-similarity take two, which only kernels do."""
    batch, true = batch_of(name, 40), batch_of(name, 40)
    for key in (key for key in ("x", "y", "candidates") if getattr(batch, key) is not None):
        rounded = normalize(getattr(batch, key).detach(), dim=-1).to(DEVICE, dtype)
        setattr(true, key, rounded.double().requires_grad_())
        setattr(batch, key, rounded.requires_grad_())
    batch.parameters["scale"] = torch.tensor(5.0, requires_grad=True)
    true.parameters["scale"] = torch.tensor(5.0, dtype=torch.float64, requires_grad=True)
    loss = {**LOWERED, "multi_similarity": multi_similarity}[name]
    (value, grads), (expected, wanted) = (
        of_batch(loss(kernel="triton", memory="flat"), batch),
        of_batch(loss().reference, true),
    )
    assert torch.allclose(value.double(), expected, rtol=1e-5)
    for key, want in wanted.items():
        assert (grads[key].double() - want).norm() < (1e-5 if dtype == torch.float32 else 8e-3) * want.norm(), key


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("unbiased", [False, True])
def test_samples_of_classes(dtype, unbiased):
    """The sampled classes are those of plain PyTorch, and the gradient is sparse."""
    found = []
    for kernel in ("torch", "triton"):
        torch.manual_seed(0)
        options = {"sample_rate": 0.3, "unbiased": unbiased, "memory": "flat", "kernel": kernel, "dtype": dtype}
        head = wb.PartialFC(24, 300, margin=wb.ArcFace(16.0, 0.3), device=DEVICE, **options)
        x = normalize(torch.randn(40, 24), dim=1).to(DEVICE, dtype).requires_grad_()
        loss = head(x, torch.randint(0, 300, (40,)).to(DEVICE))
        loss.backward()
        found.append([loss.detach().double(), x.grad.double(), head.weight.grad.to_dense().double()])
    for of_torch, of_kernels in zip(*found, strict=True):
        assert (of_torch - of_kernels).norm() < max(CLOSE[dtype]) * of_torch.norm()
    assert found[0][2].count_nonzero(1).bool().sum() < 300


@pytest.mark.parametrize("times", [1.0, 2.0**18, 2.0**-20, 0.0])
@pytest.mark.parametrize("name", ["clip", "clip, ids", "info_nce", "moco", "siglip"])
def test_losses_in_float16(in_kernels, name, times):
    """For any factor of a loss scaler, dS is scaled into float16's range, and back."""
    whole = [normalize(torch.randn(50, 24), dim=1).to(DEVICE, torch.float16) for _ in range(2)]
    ids = torch.randint(0, 30, (50,), device=DEVICE)

    def run(functions, cast, times, **more):
        leaves = [z.to(cast).requires_grad_() for z in whole]
        loss = losses(*leaves, ids)[0][name](functions, more)
        if cast == torch.float64:
            return [loss, *torch.autograd.grad(loss, leaves)]
        # Gradients are float32 until they reach float16 leaves: compare them before that.
        wide = [z.float().requires_grad_() for z in whole]
        loss = losses(*(z.half() for z in wide), ids)[0][name](functions, more)
        return [loss, *torch.autograd.grad(loss * times, wide)]

    true = run(wb.reference, torch.float64, 1.0)
    found = run(wb.functional, torch.float16, times, kernel="triton", memory="flat")
    assert (found[0].double() - true[0]).abs() < 1e-5 * true[0]
    for got, exact in zip(found[1:], true[1:], strict=True):
        assert not got.isnan().any()
        if 1e-4 < times * exact.abs().max() < 6e4:  # others do not fit into float16
            assert (got.double() / times - exact).norm() < 2e-3 * exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_no_worse_than_plain_pytorch_in_bfloat16(in_kernels, monkeypatch, name):
    """The reference on bfloat16 tensors rounds its similarities, like a matmul under autocast."""
    whole = [normalize(torch.randn(50, 24), dim=1).to(DEVICE, torch.bfloat16) for _ in range(2)]
    ids = torch.randint(0, 30, (50,), device=DEVICE)
    calls = 1 if name == "sup_con" else 2

    def gradients(functions, cast, **more):
        leaves = [z.to(cast).requires_grad_() for z in whole]
        loss = losses(*leaves, ids)[0][name](functions, more)
        return torch.cat([g.double() for g in torch.autograd.grad(loss, leaves[:calls])])

    true = gradients(wb.reference, torch.float64)
    ours = gradients(wb.functional, torch.bfloat16, kernel="triton", memory="flat")
    theirs = gradients(wb.reference, torch.bfloat16)
    assert (ours - true).norm() < (theirs - true).norm()


def test_more_exact_than_plain_pytorch_in_bfloat16(in_kernels):
    """Plain PyTorch rounds its similarities, like a matmul under autocast."""
    x, y = (normalize(torch.randn(60, 32), dim=1).to(DEVICE, torch.bfloat16) for _ in range(2))

    def gradient(loss, cast):
        leaves = [z.to(cast).requires_grad_() for z in (x, y)]
        return torch.cat([g.double() for g in torch.autograd.grad(loss(*leaves), leaves)])

    def plain(x, y):
        logits, labels = (50 * (x @ y.T)).float(), torch.arange(len(x), device=x.device)
        return (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2

    true = gradient(lambda x, y: wb.reference.clip_loss(x, y, 50.0), torch.float64)
    ours = gradient(lambda x, y: wb.functional.clip_loss(x, y, 50.0, kernel="triton", memory="flat"), torch.bfloat16)
    theirs = gradient(plain, torch.bfloat16)
    assert (ours - true).norm() < 0.5 * (theirs - true).norm()  # the interpreter truncates dS, a GPU rounds it


@pytest.mark.parametrize(
    "more",
    [
        {"statistics": True},
        {"scale": 1e5},  # a shift for each row
        {"dtype": torch.float64},
    ],
)
def test_cases_that_kernels_do_not_support_use_plain_pytorch(monkeypatch, more):
    """Forward and backward then have the same bits as with kernel="torch"."""
    monkeypatch.setattr(kernels, "tile_sums", None)
    monkeypatch.setattr(kernels, "tile_gradient", None)
    entry = importlib.import_module("wholebatch.nodes.row_statistics")  # its function has the same name
    monkeypatch.setattr(entry, "use_kernels", lambda *_: True)  # they passed their check
    settings = {"memory": "flat", **more}
    dtype, scale = settings.pop("dtype", torch.float32), settings.pop("scale", 14.3)
    statistics = settings.pop("statistics", False)
    x, y = (normalize(torch.randn(30, 8), dim=1).to(DEVICE, dtype) for _ in range(2))
    found = []
    for kernel in ("triton", "torch"):
        leaves = [z.clone().requires_grad_() for z in (x, y)]
        if scale == 1e5:
            monkeypatch.setattr(entry, "shared_shift", lambda *_: None)
        call = partial(wb.functional.clip_loss, *leaves, scale, kernel=kernel, **settings)
        loss = wb.with_statistics(call)().loss if statistics else call()
        found.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-7), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize(("labels", "sampled"), [(1, False), (1, True), (3, False), (3, True)])
@pytest.mark.parametrize("clamp", [(True, True), (False, True), (False, False)])
def test_angles_are_those_of_pytorch(in_kernels, clamp, labels, sampled, dtype, error):
    """Rows are equal to their centers, opposite, very near or short, and some centers are elsewhere."""
    centers = torch.randn(23, 70).to(DEVICE, dtype)
    index = torch.arange(0, 23, 2, device=DEVICE) if sampled else None
    targets = torch.randint(-1, 12, (37, labels), device=DEVICE)
    x, own = torch.randn(37, 70, device=DEVICE), centers[2 if index is None else index[2]].float()
    for row, away in enumerate((0.0, 1e-6, 1e-3)):
        x[row] = 3 * own + away * torch.randn(70, device=DEVICE)
        x[10 + row], targets[row, 0], targets[10 + row, 0] = -x[row], 2, 2
    x[3], centers[4] = (1e-13 if clamp[0] else x[3]), (-1e-14 if clamp[1] else centers[4])
    weights = torch.randn(2, 37, labels, dtype=torch.float64, device=DEVICE)
    found = []
    for by_kernels in (False, True):
        leaves = [z.clone().requires_grad_() for z in (x, centers)]
        *numbers, used = target_angles(*leaves, targets, clamp=clamp, index=index, in_kernels=by_kernels)
        others = (used if index is None else take_rows(used, index)).square().sum()
        gradients = torch.autograd.grad((weights * torch.stack(numbers)).sum() + others, leaves)
        found.append([z.detach().to_dense().double() for z in (*numbers, *gradients)])
    for ours, theirs, most in zip(found[1], found[0], (1e-15, 1e-15, 1e-7, error), strict=True):
        assert theirs.norm() > 0
        assert ((ours - theirs).norm(dim=1) <= most * theirs.norm(dim=1).clamp(min=1)).all()


@pytest.mark.parametrize(("centers", "learned"), [((5, 1), "xwb"), ((40, 2, 8), "xwb"), ((9, 8), "b"), ((9, 8), "wb")])
def test_rehearsals_of_classes_pass(centers, learned):
    """Vectors of one feature, sub-centers that a tile could split, and calls in which a bias alone is learned."""
    x, w, bias = torch.randn(64, centers[-1]), torch.randn(centers), torch.randn(centers[0])
    labels = torch.arange(64) % centers[0]
    found = []
    for functions, dtype, options in ((wb.functional, torch.float32, {"kernel": "triton"}), (wb.reference, None, {})):
        leaves = {
            name: z.to(DEVICE, dtype or torch.float64).requires_grad_(name in learned)
            for name, z in zip("xwb", (x, w, bias), strict=True)
        }
        for _ in range(2):
            loss = functions.partial_fc_loss(
                leaves["x"], labels.to(DEVICE), leaves["w"], bias=leaves["b"], margin=wb.CosFace(4.0), **options
            )
        found.append(torch.autograd.grad(loss, [leaves[name] for name in learned]))
    for ours, theirs in zip(*found, strict=True):
        assert (ours.double() - theirs).norm() <= 1e-5 * max(theirs.norm(), 0.1)


def on_ranks():
    """Compare losses on uneven and empty parts, by both exchanges, symmetric and normalized inside ones included."""
    rank, counts = torch.distributed.get_rank(), (7, 0, 12)
    torch.manual_seed(0)
    whole = [normalize(torch.randn(19, 10), dim=1) for _ in range(2)]
    centers, labels = 2 * torch.randn(9, 10), torch.randint(0, 9, (19,))
    local = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    of_classes = slice(3 * rank, 3 * rank + 3)
    made = {
        "clip": lambda f, x, y, *_, **more: f.clip_loss(x, y, 14.3, **more),
        "nt_xent": lambda f, x, y, *_, **more: f.nt_xent_loss(2 * x, y / 4, temperature=0.1, **more),
        "siglip": lambda f, x, y, *_, **more: f.siglip_loss(x, y, 14.3, -3.0, **more),
        "matryoshka": lambda f, x, y, *_, **more: f.matryoshka_loss(x, y, logit_scale=14.3, dims=(4, 8), **more),
        "partial_fc": lambda f, x, _, w, at, **more: f.partial_fc_loss(x, at, w, margin=wb.ArcFace(8.0), **more),
    }
    for (name, loss), exchange, dtype in product(made.items(), USED_EXCHANGES, CLOSE):
        rounded = [z.to(dtype) for z in (*whole, centers)]
        true = [z.double().requires_grad_() for z in rounded]
        expected = loss(wb.reference, *true, labels)
        expected.backward()
        mine = [z[at].clone().requires_grad_() for z, at in zip(rounded, (local, local, of_classes), strict=True)]
        more = {} if name == "partial_fc" else {"exchange": exchange}
        memory = 1000 if name == "nt_xent" else "flat"  # several tiles of a rank's local rows against themselves
        found = loss(wb.functional, *mine, labels[local], kernel="triton", memory=memory, **more)
        found.backward()
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=0)
        for got, of, at, times in zip(mine, true, (local, local, of_classes), (3, 3, 1), strict=True):
            if of.grad is not None:
                error = (got.grad.double() - times * of.grad[at]).norm()
                assert error <= (1e-5 if dtype == torch.float32 else 1e-2) * times * of.grad.norm(), (
                    name,
                    exchange,
                    dtype,
                    error,
                    of.grad.norm(),
                )


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")
def test_several_ranks_equal_one_process():
    run_ranks(on_ranks, 3)


@pytest.mark.parametrize("precision", ["bfloat16", "float16", "bfloat16x3"])
@pytest.mark.parametrize("name", ["CLIP", "NT-Xent", "SigLIP", "InfoNCE"])
def test_kernels_round_float32_as_the_sweep_does(name, precision):
    """With a named precision, as under autocast on a GPU: the errors of both are alike, and of that precision."""
    ours, truth, _ = LOSSES[name]
    x, noise = (normalize(torch.randn(96, 32, device=DEVICE), dim=1) for _ in range(2))
    y = normalize(0.3 * x + 0.7 * noise, dim=1)
    value, grad = value_and_gradients(truth, x.double(), y.double(), 20.0)
    of_kernel = dict[str, float]()
    for kernel in ("torch", "triton"):
        got, of = value_and_gradients(ours, x, y, 20.0, precision=precision, kernel=kernel)
        torch.testing.assert_close(got, value, rtol=5e-3, atol=0)
        of_kernel[kernel] = ((of - grad).norm() / grad.norm()).item()
    least, most = {"bfloat16": (5e-4, 2e-2), "float16": (5e-5, 2e-3), "bfloat16x3": (1e-7, 1e-4)}[precision]
    assert least < of_kernel["triton"] < min(most, 2 * of_kernel["torch"])


def one_rank_otherwise(fault):
    """Call CLIP's loss in kernels on all ranks but the last, which has no Triton, or names plain PyTorch."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    kernel, x = "triton", torch.eye(3)
    if rank == size - 1 and fault == "absent":
        importlib.util.find_spec = lambda name, package=None: None
    elif rank == size - 1:
        kernel = "torch"
    try:
        wb.functional.clip_loss(x, x, 1.0, kernel=kernel)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", ["absent", "other"])
def test_ranks_that_would_compute_differently_raise_on_all(size, fault):
    errors = run_ranks(one_rank_otherwise, size, fault)
    assert len(set(errors)) == 1
    assert ("needs Triton" if fault == "absent" else "kernel must be the same on all ranks") in errors[0]


def test_errors_where_there_are_no_kernels(monkeypatch):
    x = torch.eye(3)
    with pytest.raises(ValueError, match="kernel must be one of 'auto', 'torch', 'triton'; got 'cuda'"):
        wb.CLIPLoss(kernel="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="kernel='triton' is for CUDA tensors, got cpu"):
        wb.functional.clip_loss(x, x, 1.0, kernel="triton")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"kernel='triton' needs Triton: pip install triton"):
        wb.functional.clip_loss(x, x, 1.0, kernel="triton")
