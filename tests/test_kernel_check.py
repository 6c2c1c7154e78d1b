"""The kernels' check at first use: planted faults are noticed, and the ranks choose together."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
import warnings
from dataclasses import replace
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import tensor_cores
import torch
import torch.distributed as dist
from compile_kernels import as_on_cuda
from kernel_losses import losses
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch import kernels
from wholebatch.bench import loss as bench
from wholebatch.bench.subjects import Configuration
from wholebatch.contract import canaries, state_of
from wholebatch.kernels import Entries, RowTerms, TileInputs, choice, expected, launch, verify
from wholebatch.nodes import kernel_check
from wholebatch.sweep.softmax_kernels import relative_difference
from wholebatch.testing import run_ranks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="plants faults in the interpreter's kernels")
NAN = float("nan")
agree = importlib.import_module("wholebatch.contract.agree")  # the package has a function of this name

KERNELS = "tile_sums", "tile_gradient", "tile_sigmoid", "nested_sums", "nested_gradient"
OF_ANGLES = "target_chords", "target_gradients"
OF_TOKENS = "token_maxima", "token_sums", "query_gradient", "document_gradient"

# The module of a kernel, a line of it, what a fault makes of it, and losses that meet the fault.
FAULTS = {
    "a wrong constant": ("softmax", "tl.exp2(exponents)", "tl.exp2(exponents * 1.001)", "clip"),
    "a wrong constant of the sigmoid": ("sigmoid", "tl.constexpr(0.6931471805599453)", "tl.constexpr(0.69)", "siglip"),
    "a wrong constant of parts": ("nested", "tl.constexpr(1.4426950408889634)", "tl.constexpr(1.44)", "matryoshka"),
    "a wrong coefficient of the sigmoid": ("sigmoid", "0.721340208", "0.741340208", "siglip"),
    "no mask of columns": (
        "softmax", "special = (row + BM > num_rows) | (col + BN > num_cols)", "special = row + BM > num_rows", "clip",
    ),
    "no mask of rows that are stored": (
        "softmax", "tl.store(to_rows, by_row, mask=here_rows)", "tl.store(to_rows, by_row)", "clip",
    ),
    "half of the columns have no positives": (
        "softmax", "targets += tl.sum(positive_logits, 1)", "targets = tl.sum(positive_logits, 1)", "sup_con",
    ),
    "logits are rounded": (
        "softmax", "exponents = products * k - c",
        "exponents = products.to(tl.bfloat16).to(tl.float32) * k - c", "clip",
    ),
    "terms of dS are rounded before they are added": (
        "softmax", "positive_grad = nothing if CANDIDATES == NEGATIVES else grad",
        "positive_grad = nothing if CANDIDATES == NEGATIVES else grad.to(tl.bfloat16).to(tl.float32)", "sup_con",
    ),
    "one row is not written": (
        "softmax", "rows, cols, here_rows, here_cols, stride_gradient",
        "rows, cols, here_rows & (rows != 7), here_cols, stride_gradient", "clip",
    ),
    "excluded entries count": (
        "softmax", "nothing if CANDIDATES == NEGATIVES else values, nothing,",
        "nothing if CANDIDATES == NEGATIVES else values, values,", "clip, ids excluded",
    ),
    "padding of documents counts": (
        "tokens", "tl.minimum(tokens, stop - 1)", "tl.minimum(tokens, stop)", "max_sim",
    ),
    "the last token of a document is left out": (
        "tokens", "tl.minimum(tokens, stop - 1)", "tl.minimum(tokens, tl.maximum(stop - 2, first))", "max_sim",
    ),
    "the last of equal tokens of a block wins": (
        "tokens", "tl.min(among, 1) - first", "tl.max(tl.where(among < stop, among, first), 1) - first", "max_sim",
    ),
    "the last of equal blocks of tokens wins": (
        "tokens", "block_maxima > largest,", "block_maxima >= largest,", "max_sim",
    ),
    "the first block of a document alone counts": (
        "tokens", "range(first, stop, BN)", "range(first, first + 1, BN)", "max_sim",
    ),
    "winners are counted from the first document": (
        "tokens", "tl.min(among, 1) - first", "tl.min(among, 1)", "max_sim, documents stay",
    ),
    "products of tokens are rounded": (
        "tokens", "block_maxima = tl.max(products, 1)",
        "block_maxima = tl.max(products.to(tl.bfloat16).to(tl.float32), 1)", "max_sim",
    ),
    "a query loses its first token": (
        "tokens", "tl.load(starts + query).to(tl.int32)", "tl.load(starts + query).to(tl.int32) + 1", "max_sim",
    ),
    "sums of documents replace earlier ones": (
        "tokens", "total = tl.load(place, mask=valid, other=0.0)", "total = tl.zeros((BN,), tl.float32)", "max_sim",
    ),
    "a sum is stored beyond the last document": (
        "tokens", "tl.store(place, total, mask=valid)", "tl.store(place, total)", "max_sim, documents stay",
    ),
    "winners are counted from the second token": (
        "tokens", ".to(tl.int64) + tl.load(starts + document)", ".to(tl.int64) + tl.load(starts + document) + 1",
        "max_sim",
    ),
    "the last document has no gradient for queries": (
        "tokens", "for document in range(num_documents)", "for document in range(num_documents - 1)", "max_sim",
    ),
    "a query's gradient replaces an earlier one": (
        "tokens", "total = tl.load(into, mask=known, other=0.0)", "total = tl.zeros((BM, BK), tl.float32)", "max_sim",
    ),
    "the last query tokens have no gradient for documents": (
        "tokens", "range(0, num_rows, BM)", "range(0, num_rows - BM, BM)", "max_sim",
    ),
    "a document's gradient replaces an earlier one": (
        "tokens", "tl.load(into, mask=mask, other=0.0).to(tl.float32) + total", "total", "max_sim",
    ),
    "the token after the winner has the gradient": (
        "tokens", "winner[:, None] == places[None, :]", "winner[:, None] + 1 == places[None, :]", "max_sim",
    ),
    "weights of documents are rounded once": (
        "tokens", "total = tl.dot(tokens, chosen, total",
        "total = tl.dot(tokens, chosen.to(tl.bfloat16).to(tl.float32), total", "max_sim",
    ),
    "norms of angles are rounded": (
        "angles", "tl.sum(some * some, 1)", "tl.sum((some * some).to(tl.float32), 1)", "partial_fc",
    ),
    "classes have one center": ("angles", "tl.load(index + target,", "tl.load(index + 0 * target,", "partial_fc"),
    "a center elsewhere has an angle": (
        "angles", "tl.where(here, tl.sqrt(minus), 0.0)", "tl.sqrt(minus)", "partial_fc",
    ),
    "a second label replaces the first": ("angles", "inside & (slot > 0)", "inside & (slot < 0)", "partial_fc"),
    "a wrong half of an angle": ("angles", "-2 * plus * plus", "-plus * plus", "partial_fc"),
    "a center's length has no gradient": ("angles", "length_grad / norm_w", "0.0 / norm_w", "partial_fc"),
    "a row beyond the last has a gradient": (
        "angles", "to(center_grads.dtype.element_ty), mask=inside",
        "to(center_grads.dtype.element_ty), mask=(features < dim)[None, :]", "partial_fc",
    ),
}  # fmt: skip


def plant(fault, patch):
    """Let the kernels of a module have a fault."""
    name, line, wrong, _ = FAULTS[fault]
    module = importlib.import_module(f"wholebatch.kernels.tiles.{name}")
    source = inspect.getsource(module)
    assert line in source
    folder = TemporaryDirectory()
    path = Path(folder.name) / "faulty.py"
    path.write_text(source.replace(line, wrong))
    spec = importlib.util.spec_from_file_location(f"wholebatch.kernels.tiles.faulty_{name}", path)
    faulty = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = faulty
    spec.loader.exec_module(faulty)
    for kernel in (*KERNELS, *OF_TOKENS, *OF_ANGLES):
        if hasattr(module, kernel):
            patch.setattr(module, kernel, getattr(faulty, kernel))
    return folder


@pytest.fixture
def fresh(monkeypatch):
    """No choice was made yet, and no warning given."""
    for module, name, value in ((choice, "_made", {}), (choice, "_warned", set()), (choice, "_off", [])):
        monkeypatch.setattr(module, name, value)


def automatic(patch, *, in_kernels=1.0, in_pytorch=2.0):
    """Let "auto" choose on this device, where these are the milliseconds of sweeps."""
    patch.setattr(agree, "chooses", lambda device: True)
    patch.setattr(agree, "select_products", as_on_cuda)
    times = iter([in_kernels, in_pytorch] * 100)
    patch.setattr(kernel_check, "_milliseconds", lambda sweep, device: (sweep(), next(times))[1])


def value_and_gradients(name, dtype=torch.float32, **more):
    """Return a loss and its gradients, and those of the reference."""
    torch.manual_seed(0)
    whole = [normalize(torch.randn(100, 24), dim=1).to(dtype) for _ in range(2)]
    ids = torch.randint(0, 30, (100,))
    found = []
    more = {"memory": "flat", **more}  # kernels may compute it, however small it is
    for functions, cast, options in ((wb.functional, dtype, more), (wb.reference, torch.float64, {})):
        leaves = [z.to(cast).requires_grad_() for z in whole]
        loss = losses(*leaves, ids)[0][name](functions, options)
        gradients = torch.autograd.grad(loss, leaves[: 1 if name == "sup_con" else 2])
        found.append([x.detach().double() for x in (loss, *gradients)])
    return found


def assert_exact(found, expected):
    for got, true in zip(found, expected, strict=True):
        assert (got - true).norm() < 1e-5 * true.norm()


@pytest.mark.planted
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fresh, monkeypatch, fault):
    """kernel="auto" goes on in plain PyTorch, with one warning; kernel="triton" raises."""
    name = FAULTS[fault][-1]
    folder = plant(fault, monkeypatch)
    automatic(monkeypatch)
    with pytest.warns(UserWarning, match="in plain PyTorch, without its kernels: their check failed on rank 0"):
        assert_exact(*value_and_gradients(name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(*value_and_gradients(name))
    (made,) = choice.choices()
    assert not made.in_kernels
    assert "rank 0" in made.why
    with pytest.raises(ValueError, match="kernel='triton' failed its check on rank 0: KernelError"):
        value_and_gradients(name, kernel="triton")
    folder.cleanup()


PRODUCTS = {  # the features' dtype, the precision of the call, and the parts of a factor on tensor cores
    "bfloat16": (torch.bfloat16, "auto", 1),
    "float16": (torch.float16, "auto", 1),
    "float32": (torch.float32, "auto", 2),
    "tf32": (torch.float32, "tf32", 1),
}
NOT_IN_FLOAT16 = ("matryoshka", "partial_fc")  # with norms


ROWS_THAT_PASSED = set()


def check_rows_once(x, y):
    """The kernels that pass over rows use no products, so equal features pass them again."""
    if (key := (x.dtype, x.double().numpy().tobytes(), y.double().numpy().tobytes())) not in ROWS_THAT_PASSED:
        kernels.check_rows(x, y)
        ROWS_THAT_PASSED.add(key)


def checks(patch, name, products, seeds=(0,)):
    """Return the facts of the check of a loss's kernels, for other random numbers each time."""
    dtype, precision, _ = PRODUCTS[products]
    found, rehearse, generator = [], kernel_check._rehearse, torch.Generator

    def recorded(facts, *more, **named):
        for number in seeds:
            made = type("Shifted", (generator,), {"manual_seed": lambda of, at: generator.manual_seed(of, at + number)})  # noqa: B023
            with pytest.MonkeyPatch.context() as shifted:
                shifted.setattr(torch, "Generator", made)
                found.append(rehearse(facts, *more, **named))
        return {**found[-1], "passed": "", "failed": ""}  # plain PyTorch computes the loss, which is faster

    with patch.context() as inside:
        inside.setattr(kernel_check, "_rehearse", recorded)
        inside.setattr(kernel_check, "check_rows", check_rows_once)
        inside.setattr(kernel_check, "_sizes", lambda _: [kernel_check.Sizes(45, 77, 40)])
        if precision == "auto":
            inside.setattr(agree, "select_products", as_on_cuda)
        torch.manual_seed(0)
        x, y = (normalize(torch.randn(100, 24), dim=1).to(dtype).requires_grad_() for _ in range(2))
        losses(x, y, torch.randint(0, 30, (100,)))[0][name](wb.functional, {"kernel": "triton", "precision": precision})
    return found


@pytest.mark.parametrize("products", PRODUCTS)
@pytest.mark.parametrize("name", losses(*[torch.zeros(1, 1)] * 2, torch.zeros(1))[0])
def test_right_kernels_pass(fresh, monkeypatch, name, products):
    """Where products are rounded and summed as on tensor cores."""
    tensor_cores.use(monkeypatch, functools.partial(tensor_cores.matmul, parts=PRODUCTS[products][2]))
    found = checks(monkeypatch, name, products, seeds=(0, 1000, 2000))
    assert [of["failed"] for of in found] == [""] * len(found)
    family = name.split(",")[0]
    expected = {
        "siglip": {"tile_sigmoid"}, "matryoshka": {"nested_sums", "nested_gradient"}, "max_sim": {*OF_TOKENS},
    }.get(family, {"tile_sums", "tile_gradient"})  # fmt: skip
    if products == "float16" and family in NOT_IN_FLOAT16 and "not normalized" not in name:
        expected = set()
    in_boxes = PRODUCTS[products][0] != torch.float32 and family not in ("matryoshka", "max_sim")
    expected = {name if in_boxes else f"{name}_by_pointers" for name in expected}
    assert all(set(of["passed"].split()) == expected for of in found)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ("clip", "nt_xent", "sup_con", "siglip", "matryoshka", "partial_fc", "max_sim")]
    + [("max_sim, documents stay", torch.float32), ("max_sim", torch.bfloat16)],
)
def test_each_form_of_a_kernel_that_a_call_starts_is_checked(fresh, monkeypatch, name, dtype):
    """A form has arguments of other types, none of some, or columns that follow each other: it is another program.

    Of `row_gradient`, each switch is checked, and not each combination of them.
    """
    run, forms = launch.run, {True: set(), False: set()}

    def recorded(kernel, programs, *arguments, **constants):
        tensors = [x for x in arguments if x is None or isinstance(x, torch.Tensor)]
        kinds = [x if x is None else (x.dtype, x.dim() == 2 and x.stride(0) < x.stride(1)) for x in tensors]
        if kernel.fn.__name__ != "row_gradient":
            forms[launch.memory is not None].add((kernel.fn.__name__, *kinds))
        return run(kernel, programs, *arguments, **constants)

    monkeypatch.setattr(launch, "run", recorded)
    x, y = (normalize(torch.randn(100, 24), dim=1).to(dtype).requires_grad_() for _ in range(2))
    for memory in ("auto", "flat"):
        options = {"kernel": "triton", "memory": memory}
        losses(x, y, torch.randint(0, 30, (100,)))[0][name](wb.functional, options).backward()
    assert len(forms[False]) > 1
    assert forms[False] <= forms[True]


@pytest.mark.parametrize(("name", "kernel", "sums"), [("nt_xent", "tile_sums", 2), ("max_sim", "token_sums", 2)])
def test_only_the_sweep_is_timed(fresh, monkeypatch, name, kernel, sums):
    """Further forms, which other calls take, are checked beside it: their time would count against kernels."""
    run, started, timed = launch.run, [], []

    def recorded(jit, *arguments, **constants):
        started.append(jit.fn.__name__)
        return run(jit, *arguments, **constants)

    monkeypatch.setattr(launch, "run", recorded)
    automatic(monkeypatch)

    def milliseconds(sweep, device):
        started.clear()
        sweep()
        timed.append(started.count(kernel))
        return 1.0

    monkeypatch.setattr(kernel_check, "_milliseconds", milliseconds)
    x, y = (normalize(torch.randn(100, 24), dim=1).bfloat16().requires_grad_() for _ in range(2))
    losses(x, y, torch.randint(0, 30, (100,)))[0][name](wb.functional, {"memory": "flat"})
    assert timed == [sums, 0]  # in kernels, and in plain PyTorch


def rounded_to(dtype):
    return lambda a, b, total: (torch.from_numpy(total + a @ b).to(dtype).float()).numpy()


# Products with faults that are small, and where they can be told from right ones.
FAULTY_PRODUCTS = {
    "one feature is missing": (lambda a, b, total: total + np.delete(a, 5, 1) @ np.delete(b, 5, 0), [*PRODUCTS]),
    "the scale is off by 1 %": (lambda a, b, total: total + np.float32(1.01) * (a @ b), [*PRODUCTS]),
    "logits are rounded to bfloat16": (rounded_to(torch.bfloat16), ["bfloat16", "float16", "float32"]),
    "logits are rounded to float16": (rounded_to(torch.float16), ["bfloat16", "float16", "float32"]),
    "one product of tf32 instead of three": (functools.partial(tensor_cores.matmul, parts=1), ["float32"]),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", ["clip", "nt_xent", "siglip", "matryoshka", "partial_fc", "max_sim"])
@pytest.mark.parametrize(("fault", "products"), [(f, p) for f, (_, of) in FAULTY_PRODUCTS.items() for p in of])
def test_faults_of_products_are_noticed(fresh, monkeypatch, name, fault, products):
    tensor_cores.use(monkeypatch, FAULTY_PRODUCTS[fault][0])
    (found,) = checks(monkeypatch, name, products)
    assert "times that" in found["failed"] or (name in NOT_IN_FLOAT16 and products == "float16")


def neighbors(numbers, at=3):
    """Return numbers of which one is its neighbor's."""
    made = numbers.clone()
    made[..., at] = made[..., at + 1]
    return made


def one_less(entries):
    """Return a set of entries without one."""
    named = entries.named.clone()
    named.view(-1)[(named >= 0).flatten().nonzero()[3]] = -1
    return replace(entries, named=named)


def of_tile(**changes):
    return lambda given: {"tile": replace(given["tile"], **{at: to(given["tile"]) for at, to in changes.items()})}


OFF = torch.tensor([0.0, 1e-3 / log(2)])  # of a shift or bias, times log2(e)

# A launcher, a loss, and the arguments that the kernels get instead of the given ones.
FAULTY_ARGUMENTS = {
    "a row has its neighbor's weight": (
        "tile_gradient", "clip", lambda given: {"rows": {at: neighbors(of) for at, of in given["rows"].items()}},
    ),
    "a column has its neighbor's weight": (
        "tile_gradient", "clip", lambda given: {"cols": {at: neighbors(of) for at, of in given["cols"].items()}},
    ),
    "positives have no weight": (
        "tile_gradient", "clip, ids", lambda given: {"rows": {**given["rows"], "target": 0 * given["rows"]["target"]}},
    ),
    "one positive is missing": ("tile_sums", "clip", of_tile(positive=lambda tile: one_less(tile.positive))),
    "one positive's gradient is missing": (
        "tile_gradient", "clip", of_tile(positive=lambda tile: one_less(tile.positive)),
    ),
    "positives are off by one": ("tile_gradient", "clip", of_tile(first_row=lambda tile: tile.first_row + 1)),
    "one excluded entry counts": ("tile_sums", "nt_xent", of_tile(excluded=lambda tile: one_less(tile.excluded))),
    "excluded entries are off by one": ("tile_sums", "nt_xent", of_tile(first_row=lambda tile: tile.first_row + 1)),
    "the shift is off by 1/1000": ("tile_sums", "clip", of_tile(numbers=lambda tile: tile.numbers + OFF)),
    "a row has its neighbor's scale": (
        "tile_sums", "partial_fc", of_tile(row_terms=lambda tile: RowTerms(neighbors(tile.row_terms.scales), None)),
    ),
    "a row has its neighbor's offset": (
        "tile_sums", "partial_fc, bias",
        of_tile(row_terms=lambda tile: replace(tile.row_terms, offsets=neighbors(tile.row_terms.offsets))),
    ),
    "one positive is not negated": ("tile_sigmoid", "siglip", of_tile(positive=lambda tile: one_less(tile.positive))),
    "positives are not negated": ("tile_sigmoid", "siglip", of_tile(positive=lambda tile: Entries())),
    "the bias is off by 1/1000": ("tile_sigmoid", "siglip", of_tile(numbers=lambda tile: tile.numbers + OFF)),
    "a row of a part has its neighbor's scale": (
        "nested_sums", "matryoshka", of_tile(row_scales=lambda tile: neighbors(tile.row_scales)),
    ),
    "a part ends early": (
        "nested_sums", "matryoshka",
        of_tile(ends=lambda tile: replace(tile.ends, stops=2 * tile.ends.stops - 1, unit=tile.ends.unit // 2)),
    ),
    "a row of a part has its neighbor's weight": (
        "nested_gradient", "matryoshka",
        lambda given: {"weights": replace(given["weights"], rows=neighbors(given["weights"].rows))},
    ),
    "a document starts late": (
        "token_maxima", "max_sim", of_tile(starts=lambda tile: torch.cat([tile.starts[:1] + 1, tile.starts[1:]])),
    ),
}  # fmt: skip


@pytest.mark.planted
@pytest.mark.parametrize(
    ("fault", "products"),
    [
        (fault, products)
        for fault in FAULTY_ARGUMENTS
        for products in ("bfloat16", "float32", "tf32")
        # TF32 may change an exponential by 1 %; neighbors' offsets differ by less.
        if not (products == "tf32" and ("1/1000" in fault or "offset" in fault))
    ],
)
def test_faults_of_arguments_are_noticed(fresh, monkeypatch, fault, products):
    """A fault of few entries, or a small one of all, that dS in bfloat16 shows as well."""
    kernel, name, change = FAULTY_ARGUMENTS[fault]
    launcher = getattr(kernels, kernel).__wrapped__
    met = []

    @functools.wraps(launcher)
    def faulty(*args, **more):
        given = inspect.signature(launcher).bind(*args, **more).arguments
        try:
            changed = {**given, **change(given)}
        except (KeyError, AttributeError, IndexError):  # not in this tile
            return launcher(*args, **more)
        met.append(1)
        return launcher(**changed)

    of = [getattr(expected, kernel), *([expected.found_maxima] if kernel == "token_maxima" else [])]
    monkeypatch.setattr(kernels, kernel, verify.checked_by(*of)(faulty))
    (found,) = checks(monkeypatch, name, products)
    assert met
    assert found["failed"].startswith(f"KernelError: {kernel}, ")


@pytest.mark.parametrize("block", [4, 8, 16])
@pytest.mark.parametrize("dim", [1, 3, 24, 128, 1024, 4096])
@pytest.mark.parametrize("products", PRODUCTS)
def test_products_on_tensor_cores_are_as_exact_as_the_check_demands(products, dim, block):
    """They pass with few features and many, however many products a tensor core adds at once, by a factor up to 50."""
    dtype, precision, parts = PRODUCTS[products]
    x, y = (unit_rows(32, dim, dtype, seed) for seed in range(2))
    tile = TileInputs(x, y, 1.0, Entries(), Entries(), 0, 0, allows_tf32=precision == "tf32")
    true, allowed = expected._products(tile, dim)
    zeros = np.zeros((len(x), len(y)), np.float32)
    found = tensor_cores.matmul(x.float().numpy(), y.float().numpy().T.copy(), zeros, parts=parts, block=block)
    share = ((torch.from_numpy(found).double() - true).abs() / allowed).max()
    assert share <= 1
    assert share > 0.02 or dim == 1


def unit_rows(rows, dim, dtype, seed):
    return normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1).to(dtype)


@pytest.mark.parametrize(
    ("dim", "rows", "cols", "at", "on_a_card", "true"),
    [(512, 300, 500, 110, -2.720184e-05, -2.71777e-05), (1024, 2304, 2304, 669, -0.0008251546, -0.0008249768)],
)
def test_logits_that_nearly_cancel(dim, rows, cols, at, on_a_card, true):
    """An H100's results: their errors are tiny beside the terms of the product, and 1e-3 of the logit."""
    x, y = (unit_rows(n, dim, torch.bfloat16, seed)[: at + 1] for seed, n in enumerate((rows, cols)))
    positive = Entries(torch.arange(at + 1, dtype=torch.int32)[None])
    numbers = kernels.launch.numbers_of(14.3, 3.0, x.device)
    truth = expected.tile_sums(TileInputs(x, y, numbers, positive, Entries(), 0, 0), rows=["target"], cols=[])
    targets, errors = truth["rows: target"]
    assert abs(targets[at] - true) < 1e-5 * abs(true)
    found = targets.float()
    found[at] = on_a_card
    verify._compare("targets", found, targets, errors)
    products = 14.3 * x[at].double() * y[at].double()
    for wrong in (products[1:].sum(), products.sum() + 1e-3 * products.abs().sum(), targets[at - 1], NAN):
        found[at] = wrong
        with pytest.raises(verify.KernelError, match=rf"targets: 1 of .* the worst, at \({at},\), is .* times that"):
            verify._compare("targets", found, targets, errors)


@pytest.mark.parametrize(("in_kernels", "in_pytorch"), [(1.0, 2.0), (2.0, 1.0)])
def test_the_faster_one_computes(fresh, monkeypatch, in_kernels, in_pytorch):
    """One sweep each is timed, once; no warning says that plain PyTorch is faster."""
    automatic(monkeypatch, in_kernels=in_kernels, in_pytorch=in_pytorch)
    started = []
    run = kernels.launch.run
    monkeypatch.setattr(kernels.launch, "run", lambda *of, **more: (started.append(1), run(*of, **more))[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_exact(*value_and_gradients("clip"))
        started.clear()
        assert_exact(*value_and_gradients("clip"))
    assert bool(started) == (in_kernels < in_pytorch)
    (made,) = choice.choices()
    assert made.milliseconds == (in_kernels, in_pytorch)
    assert made.why == ("" if in_kernels < in_pytorch else "it was faster")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("[Errno 2] No such file or directory: 'gcc'"),
        PermissionError("[Errno 13] Permission denied: '/home/user/.triton/cache'"),
        RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 101376"),
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
    ],
)
def test_a_kernel_that_does_not_start(fresh, monkeypatch, error):
    automatic(monkeypatch)

    def fail(*_, **__):
        raise error

    monkeypatch.setattr(kernels.launch, "run", fail)
    with pytest.warns(UserWarning, match="their check failed on rank 0") as warned:
        assert_exact(*value_and_gradients("clip"))
    assert str(error) in str(warned[0].message)
    with pytest.raises(ValueError, match=f"failed its check on rank 0: {type(error).__name__}"):
        value_and_gradients("clip", kernel="triton")


def test_a_row_of_a_benchmark_has_the_choices(fresh, monkeypatch):
    automatic(monkeypatch)
    monkeypatch.setattr(bench, "check", lambda *_: None)  # slow in Triton's interpreter, and tested elsewhere
    job = bench.Job("clip", [Configuration(), Configuration(kernel="torch")], 64, 32, 1, 1, {})
    chosen, named = bench.measure(wb.comm.LocalCommunicator(), job, torch.device("cpu"))
    assert chosen.choices == [*map(str, choice.choices())]
    assert "clip_loss" in chosen.choices[0]
    assert named.choices == []


def test_a_check_changes_no_random_numbers(fresh, monkeypatch):
    automatic(monkeypatch)
    value_and_gradients("clip", kernel="torch")
    expected = torch.rand(3)
    value_and_gradients("clip")
    assert choice.choices()
    assert torch.equal(torch.rand(3), expected)


def one_rank_otherwise(fault, kernel):
    """Return the error, the warnings and the choices of this rank, where rank 1 has a fault."""
    torch.manual_seed(0)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        automatic(patch)
        folder = None
        if rank == 1 and fault == "no Triton":
            patch.setattr(agree, "missing", lambda device: "needs Triton")
        elif rank == 1 and fault == "an older GPU":
            patch.setattr(agree, "chooses", lambda device: False)
            patch.setattr(agree, "missing", lambda device: "is for NVIDIA GPUs of compute capability 8.0 or higher")
        elif rank == 1:
            folder = plant(fault, patch)
        counts = (0, 6, 7)[:size]  # a rank without rows has nothing to check
        local = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        whole = [normalize(torch.randn(sum(counts), 24), dim=1) for _ in range(2)]
        error = ""
        for _ in range(2):
            mine, true = (
                [z.clone().requires_grad_() for z in of]
                for of in ([z[local] for z in whole], [z.double() for z in whole])
            )
            try:
                loss = wb.functional.clip_loss(*mine, 14.3, kernel=kernel)
            except ValueError as raised:
                error = str(raised)
                break
            loss.backward()
            expected = wb.reference.clip_loss(*true, 14.3)
            expected.backward()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
            for got, of in zip(mine, true, strict=True):
                assert (got.grad.double() - size * of.grad[local]).norm() <= 1e-5 * size * of.grad.norm()
        if folder is not None:
            folder.cleanup()
        ours = [str(each.message) for each in warned if "wholebatch" in str(each.message)]
        return error, ours, [str(made.in_kernels) for made in choice.choices()]


@pytest.mark.planted
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fault", ["a wrong constant", "logits are rounded", "no Triton", "an older GPU"])
def test_one_rank_with_a_fault(size, fault):
    """All ranks go on in plain PyTorch, and one of them warns, once."""
    found = run_ranks(one_rank_otherwise, size, fault, "auto")
    assert [error for error, _, _ in found] == [""] * size
    assert [len(warned) for _, warned, _ in found] == [1, *[0] * (size - 1)]
    assert "rank 1" in found[0][1][0]
    assert all("True" not in made for _, _, made in found)


@pytest.mark.planted
@pytest.mark.parametrize("fault", ["a wrong constant", "logits are rounded"])
def test_one_rank_with_a_fault_where_kernels_are_named(fault):
    """All ranks raise the same error."""
    found = run_ranks(one_rank_otherwise, 2, fault, "triton")
    errors = [error for error, _, _ in found]
    assert len(set(errors)) == 1
    assert "kernel='triton' failed its check on rank 1: KernelError: tile_" in errors[0]


def other_choices_body():
    """Call a loss, let rank 1 forget its choice for another one, and call the loss again."""
    with pytest.MonkeyPatch.context() as patch:
        automatic(patch)
        x, y = normalize(torch.randn(2, 5, 24), dim=-1)
        for _ in range(2):
            wb.functional.clip_loss(x, y, 14.3)
            ((group, made),) = choice._made.items()
            (found,) = made.values()
            if dist.get_rank() == 1:
                choice.forget(group)
                choice.note(group, "another form", found, reports=False)
        return [made.call for made in choice.choices()]


def test_ranks_with_other_choices_make_them_again():
    """As many as the others have, but of another group of the same name: all ranks check, or some would wait."""
    assert run_ranks(other_choices_body, 2, timeout_s=30) == [["clip_loss"]] * 2


@pytest.mark.planted
def test_canaries_notice_faults_after_the_check(fresh, monkeypatch):
    """A fault that begins later is an error of the next call, and kernels are off from then on."""
    automatic(monkeypatch)
    monkeypatch.setattr(canaries, "EVERY", 1)
    assert_exact(*value_and_gradients("clip"))
    assert_exact(*value_and_gradients("clip"))  # the canaries of right kernels say nothing
    assert choice.choices()[0].in_kernels
    for fault, named in (("no mask of columns", "tile_sums"),):
        with monkeypatch.context() as patch:
            folder = plant(fault, patch)
            found, expected = value_and_gradients("clip")
            assert (found[0] - expected[0]).abs() > 1e-4 * expected[0]
            folder.cleanup()
        with pytest.raises(RuntimeError, match=f"contradict each other in an earlier call: .*{named}"):
            value_and_gradients("clip")
    with pytest.warns(UserWarning, match="is switched off in this process"):
        assert_exact(*value_and_gradients("clip"))
    with pytest.raises(ValueError, match="kernel='triton' is switched off in this process"):
        value_and_gradients("clip", kernel="triton")


@pytest.mark.planted
def test_canaries_notice_a_product_that_misses_a_tile(fresh, monkeypatch):
    """<X, U> is not <Y, V> then."""
    automatic(monkeypatch)
    monkeypatch.setattr(canaries, "EVERY", 1)
    value_and_gradients("clip")
    multiply = wb.sweep.Products.multiply

    def without_v(self, a, b, out, **more):
        return out.zero_() if a[0].stride(0) == 1 else multiply(self, a, b, out, **more)  # a transposed tile of dS

    with monkeypatch.context() as patch:
        patch.setattr(wb.sweep.Products, "multiply", without_v)
        value_and_gradients("clip")
    with pytest.raises(RuntimeError, match=r"<X, U> is .* and <Y, V> is"):
        value_and_gradients("clip")


def test_a_new_group_does_not_read_canaries_of_an_earlier_one(tmp_path):
    """Both have the same name: a process that leaves a group and enters another has other partners."""
    for number in range(2):
        dist.init_process_group("gloo", f"file://{tmp_path}/{number}", rank=0, world_size=1)
        try:
            found = state_of(wb.comm.TorchCommunicator().transport).canaries
            assert found.numbers() == {}
            found.note_sums(torch.tensor(1.0))
            assert state_of(wb.comm.TorchCommunicator().transport).canaries.numbers() != {}
        finally:
            dist.destroy_process_group()


def test_canaries_of_tiny_sums_say_nothing(fresh):
    """A GPU may count numbers below the smallest normal one as 0; a fault in sums of normal size is still seen."""
    tiny = torch.finfo(torch.float32).tiny

    def difference(by_rows, by_cols):
        made = relative_difference(torch.tensor(by_rows), torch.tensor(by_cols), 16384)
        found = canaries.Canaries()
        found.note_sums(made)
        found.check({name: [float(of)] for name, of in found.numbers().items()})

    for sums in ((0.0, 0.0), (tiny / 2, 0.0), (0.0, 16384 * tiny), (3e-34, 4e-34)):
        difference(*sums)
    for sums in ((1.0, 1.01), (1e-20, 2e-20), (1e-25, 0.0)):
        with pytest.raises(RuntimeError, match="sums over rows and over columns differ"):
            difference(*sums)


def test_canaries_that_are_not_finite_say_nothing():
    """A loss scaler's overflow makes gradients infinite."""
    found = canaries.Canaries()
    x = torch.ones(2, 3)
    found.note_products((x, x * NAN, None), (x, x, None))
    found.check({name: [float(number)] for name, number in found.numbers().items()})
