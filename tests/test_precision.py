"""The precision of products: which one is chosen, that all ranks share it, and how exact a loss is with each.

A CPU rounds factors as tensor cores do, and sums in float32. Fake CUDA tensors show the dtype of every product.
"""

import contextlib
from importlib import import_module
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from precision_losses import LOSSES, errors, features, value_and_gradients
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from wholebatch import functional as wf
from wholebatch import reference
from wholebatch._base.autograd import autocast_around
from wholebatch.comm import LocalCommunicator
from wholebatch.contract import entry
from wholebatch.sweep import Products, driver, select_products
from wholebatch.sweep import products as of_products
from wholebatch.testing import RankError, run_ranks

CPU, CUDA, MPS = torch.device("cpu"), torch.device("cuda:0"), torch.device("mps")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture
def half_products(monkeypatch):
    """Pretend that the GPU has products of half precision with sums in float32."""
    monkeypatch.setattr(of_products, "_missing", lambda half, device: None)


@pytest.mark.parametrize(
    ("dtype", "device", "autocast", "chosen"),
    [
        (BF16, CUDA, None, "bfloat16"),
        (FP16, CUDA, None, "float16"),
        (FP16, CUDA, BF16, "float16"),  # as they are: autocast would round them
        (FP32, CUDA, BF16, "bfloat16"),
        (FP32, CUDA, FP16, "float16"),
        (FP32, CUDA, None, "float32"),
        (FP64, CUDA, BF16, "float32"),  # which stands for float64 there
        (BF16, CPU, BF16, "float32"),
        (FP32, CPU, BF16, "float32"),
        (FP32, MPS, FP16, "float32"),
    ],
)
def test_what_auto_chooses(dtype, device, autocast, chosen, half_products):
    assert select_products("auto", dtype, device, autocast) == Products(chosen)


@pytest.fixture
def tf32_allowed():
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, "tf32"
    yield settings
    settings.fp32_precision = before


def test_auto_takes_tf32_where_the_program_allows_it(tf32_allowed):
    assert select_products("auto", FP32, CUDA, None).precision == "tf32"
    assert select_products("auto", FP32, CPU, None).precision == "float32"
    assert Products("tf32").allows_tf32
    assert not Products("float32", named=True).allows_tf32
    with of_products._tf32(allowed=False):
        assert tf32_allowed.fp32_precision == "ieee"
    assert tf32_allowed.fp32_precision == "tf32"


def test_without_half_products_auto_is_float32_with_one_warning(monkeypatch):
    monkeypatch.setattr(of_products, "_missing", lambda half, device: "too old")
    of_products._warn.cache_clear()
    with pytest.warns(UserWarning, match="in float32 on this device: too old"):
        assert select_products("auto", BF16, CUDA, None).precision == "float32"
    assert select_products("auto", BF16, CUDA, None).precision == "float32"
    with pytest.raises(ValueError, match=r"one of \['auto', 'float32'\] here, got 'bfloat16': too old"):
        select_products("bfloat16", FP32, CUDA, None)


def test_a_precision_that_features_or_device_do_not_have():
    with pytest.raises(ValueError, match="must be 'auto' for float64 features"):
        select_products("bfloat16", FP64, CPU, None)
    with pytest.raises(ValueError, match=r"one of \['auto', 'float32'\] here, got 'tf32': mps has no such products"):
        select_products("tf32", FP32, MPS, None)
    x = torch.eye(3)
    with pytest.raises(ValueError, match=r"precision must be one of .*got 'fp32'"):
        wf.clip_loss(x, x, 10.0, precision="fp32")
    with pytest.raises(ValueError, match="precision='float16' needs rows of a norm up to 65504, got 100000"):
        wf.clip_loss(1e5 * x, x, 1e-4, precision="float16")


ROWS = [  # features, autocast, factors of products
    (BF16, None, BF16),
    (FP16, None, FP16),
    (FP32, BF16, BF16),
    (FP32, FP16, FP16),
    (FP32, None, FP32),
    (FP64, BF16, FP64),
]


@contextlib.contextmanager
def autocast_on_cuda(dtype):
    """Set the flags of autocast; without CUDA, torch.autocast itself turns them off again."""
    before = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", dtype is not None)
    torch.set_autocast_dtype("cuda", dtype or before[1])
    yield
    torch.set_autocast_enabled("cuda", before[0])
    torch.set_autocast_dtype("cuda", before[1])


class Recorded(TorchDispatchMode):
    """Record the dtypes of the factors and of the result of every product of matrices."""

    def __init__(self):
        super().__init__()
        self.products = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if operator.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            a, b = [arg for arg in args if isinstance(arg, torch.Tensor)][-2:]
            self.products.append((a.dtype, b.dtype, result.dtype))
        return result


@entry
def chosen_here(x):
    """Return the products that a loss chooses for x; inside another loss autocast is off, and not asked again."""
    assert not torch.is_autocast_enabled(x.device.type)
    return select_products("auto", x.dtype, x.device, autocast_around(x.device))


@entry
def in_another(x):
    return chosen_here(x)


@pytest.mark.parametrize(("dtype", "autocast", "factors"), ROWS)
@pytest.mark.parametrize("loss", [chosen_here, in_another])
def test_the_dtype_of_every_product_on_cuda(loss, dtype, autocast, factors, half_products):
    """S and dS Y of fake CUDA tensors: half precision, with results in float32, and autocast's flags."""
    with FakeTensorMode(), Recorded() as recorded:
        x, y = (torch.empty(24, 24, dtype=dtype, device="cuda") for _ in range(2))
        with autocast_on_cuda(autocast):
            products = loss(x)
        assert autocast_around(x.device) is None
        result = FP64 if dtype == FP64 else FP32
        x, y = (tuple(z.to(of) for of in products.dtypes(dtype)) for z in (x, y))
        tile = products.multiply(x, y, torch.empty(24, 24, dtype=result, device="cuda"))
        grad = tuple(tile.to(of) for of in products.dtypes(result))
        products.multiply(grad, y, torch.empty(24, 24, dtype=result, device="cuda"))
    assert recorded.products == [(factors, factors, result)] * 2


@pytest.mark.parametrize(("dtype", "autocast", "factors"), ROWS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_gives_the_chosen_factors_to_every_product(name, dtype, autocast, factors, monkeypatch, half_products):
    """The same rows of the table in whole losses, on a CPU that chooses as CUDA does."""
    recorded, ours = [], LOSSES[name][0]
    multiply = Products._multiply

    def recording(self, a, b, out, *, add):
        recorded.append((a.dtype, b.dtype, out.dtype))
        multiply(self, a, b, out, add=add)

    monkeypatch.setattr(Products, "_multiply", recording)
    agree = import_module("wholebatch.contract.agree")
    as_on_cuda = select_products("auto", dtype, CUDA, autocast)
    monkeypatch.setattr(agree, "select_products", lambda *_: as_on_cuda)
    x, y = (z.to(dtype).requires_grad_() for z in features("random"))
    loss = ours(x, y, 5.0, memory="flat")  # not the one tile of small batches on CPUs
    loss.backward()
    assert x.grad.dtype == y.grad.dtype == dtype
    result = FP64 if dtype == FP64 else FP32
    assert loss.dtype == result
    assert len(recorded) >= 2
    assert recorded[0] == (factors, factors, result)
    of_gradients = FP16 if factors == BF16 else factors
    assert set(recorded) == {(factors, factors, result), (of_gradients, of_gradients, result)}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("kind", ["random", "half trained", "trained"])
def test_half_precision_is_at_least_as_exact_as_plain_pytorch_under_autocast(name, kind):
    for scale in (10.0, 50.0, 100.0):
        torch.manual_seed(0)
        of_ours, of_plain = (errors(name, kind, scale, precision)[1] for precision in ("bfloat16", "autocast"))
        assert of_ours <= of_plain


@pytest.mark.parametrize("kind", ["random", "half trained", "trained"])
@pytest.mark.parametrize("name", ["CLIP", "InfoNCE", "NT-Xent", "SigLIP", "PartialFC, not normalized"])
def test_rounding_the_gradient_of_logits_costs_little(name, kind):
    """Features are bfloat16 already, so that the error is that of dS: a fifth at most of plain PyTorch's."""
    for scale in (10.0, 50.0, 100.0):
        found = []
        for precision in ("bfloat16", "autocast"):
            torch.manual_seed(0)
            found.append(errors(name, kind, scale, precision, given=BF16)[1])
        assert 5 * found[0] <= found[1]


@pytest.mark.parametrize("length", [2.0**-6, 1.0, 1e5])
def test_rows_that_float16_does_not_hold(length, monkeypatch):
    """Under bfloat16, dS is in float16 where rows are neither tiny nor long; else in bfloat16, with the same range."""
    dtypes = set()
    gradient = driver.Driver.gradient
    monkeypatch.setattr(driver.Driver, "gradient", lambda *of: (made := gradient(*of), dtypes.add(made.dtype))[0])
    torch.manual_seed(0)
    x, y = (length * z.bfloat16().float() for z in features("half trained"))
    scale = 10 / length**2
    _, truth = value_and_gradients(reference.clip_loss, x.double(), y.double(), scale)
    _, found = value_and_gradients(wf.clip_loss, x, y, scale, precision="bfloat16", memory="flat")
    assert dtypes == {FP16 if length == 1.0 else BF16}
    assert (found - truth).norm() <= 1e-2 * truth.norm()


@pytest.mark.parametrize("name", LOSSES)
def test_errors_are_those_of_the_factors(name):
    """Each precision is near its own rounding, and not near that of the next: the name is no mere label."""
    torch.manual_seed(0)
    found = [errors(name, "random", 10.0, precision)[1] for precision in ("float32", "bfloat16x3", "tf32", "bfloat16")]
    assert all(error < bound for error, bound in zip(found, (1e-6, 3e-5, 1e-3, 1e-2), strict=True))
    assert all(3 * before < after for before, after in pairwise(found))
    assert found[2] / 4 < errors(name, "random", 10.0, "float16")[1] < 4 * found[2]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_positive_pairs_are_multiplied_apart(precision, monkeypatch):
    """Against the gradient at the rounded features: 5 times more exact than with positives in the rounded tile."""
    dtype = getattr(torch, precision)
    for kind in ("random", "half trained", "trained"):
        torch.manual_seed(0)
        x, y = (z.to(dtype).float() for z in features(kind))
        _, truth = value_and_gradients(reference.clip_loss, x.double(), y.double(), 10.0)
        _, apart = value_and_gradients(wf.clip_loss, x, y, 10.0, precision=precision, memory="flat")
        with monkeypatch.context() as patch:

            def inside(self, grad, tile, x, y, block, u, v, pairs=None, *, products=driver.Driver.products):
                grad[pairs[0]] = pairs[1].to(grad.dtype)
                products(self, grad, tile, x, y, block, u, v)

            patch.setattr(driver.Driver, "products", inside)
            _, wrong = value_and_gradients(wf.clip_loss, x, y, 10.0, precision=precision, memory="flat")
        assert 5 * (apart - truth).norm() <= (wrong - truth).norm()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("precision", ["tf32", "bfloat16x3", "bfloat16"])
def test_memory_in_bytes_and_several_tiles(name, precision):
    """Small tiles compute the same products; features keep their values."""
    ours, *_ = LOSSES[name]
    torch.manual_seed(0)
    x, y = features("half trained")
    given = x.clone(), y.clone()
    _, whole = value_and_gradients(ours, x, y, 20.0, precision=precision)
    _, parts = value_and_gradients(ours, x, y, 20.0, precision=precision, memory=40_000)
    assert torch.equal(x, given[0])
    assert torch.equal(y, given[1])
    torch.testing.assert_close(parts, whole, rtol=1e-3, atol={"float32": 1e-6}.get(precision, 1e-4) * whole.abs().max())


def _another_precision():
    x = torch.eye(4)[dist.get_rank() : dist.get_rank() + 1]
    wf.clip_loss(x, x, 10.0, precision="bfloat16" if dist.get_rank() == 0 else "auto")


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_with_another_precision_raise(size):
    with pytest.raises(RankError, match="precision of products must be the same on all ranks, got rank 0: bfloat16"):
        run_ranks(_another_precision, size)


def _sharded(precision, exchange):
    torch.manual_seed(0)
    x, y = features("half trained")
    bounds = [0, 200, 200, 384] if dist.get_world_size() == 3 else [0, 100, 384]
    local = slice(*bounds[dist.get_rank() : dist.get_rank() + 2])
    a, b = (z[local].clone().requires_grad_() for z in (x, y))
    loss = wf.clip_loss(a, b, 20.0, sync=None, precision=precision, exchange=exchange)
    loss.backward()
    alone = LocalCommunicator()
    full = value_and_gradients(wf.clip_loss, x, y, 20.0, precision=precision, group=alone)[1].view(2, 384, -1)[:, local]
    torch.testing.assert_close(
        torch.stack([a.grad, b.grad]).double(), full, rtol=2e-3, atol=2e-3 * full.abs().max() if len(a) else 1.0
    )


@pytest.mark.parametrize(
    ("size", "precision", "exchange"),
    [(2, "bfloat16x3", "gather"), (2, "bfloat16", "ring"), (3, "float16", "ring"), (3, "bfloat16", "gather")],
)
def test_several_ranks_compute_what_one_does(size, precision, exchange):
    run_ranks(_sharded, size, precision, exchange)


@pytest.mark.parametrize("fault", ["", "alpha", "beta", "half", "absent"])
def test_products_of_halves_are_checked_once_on_the_gpu(fault, monkeypatch):
    """On a pretended GPU: right products pass; an ignored alpha or beta, or sums in half precision, do not."""

    def addmm(total, a, b, *, beta=1, alpha=1, out_dtype, out):
        if fault == "absent":
            raise NotImplementedError("no kernel\nand more")
        product = (a @ b).to(out_dtype) if fault == "half" else a.float() @ b.float()
        kept = 0 if not beta and fault != "beta" else total
        return out.copy_(kept + (1 if fault == "alpha" else alpha) * product)

    def mm(a, b, *, out_dtype, out):
        return out.copy_(a.float() @ b.float())

    monkeypatch.setattr(of_products, "_has_products_of_halves", lambda a, out: a.dtype != out.dtype)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    missing = of_products._missing.__wrapped__(BF16, CPU)
    assert (missing is None) == (not fault)
    if fault:
        assert missing == "torch.addmm with out_dtype=torch.float32 " + (
            "fails: no kernel" if fault == "absent" else "gives wrong results"
        )
