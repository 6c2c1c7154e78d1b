"""SigLIP in kernels where it takes a few launches: gradients in every combination that a caller may need."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.nodes import sigmoid_in_kernels
from wholebatch.testing import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the interpreter")
ROWS, SIZES = 50, (20, 0, 30)  # of all ranks, and of each of three
BOUND = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
INPUTS = ("x", "y", "scale", "bias", "weights")


def inputs(dtype, rows=slice(None)):
    """Return features, scale, bias, and weights of very different sizes."""
    torch.manual_seed(0)
    x, y = (normalize(torch.randn(ROWS, 24), dim=1).to(dtype) for _ in range(2))
    y = (y + 0.5 * x).to(dtype)
    weights = 10 ** torch.linspace(-30, -28, ROWS)
    weights[3] = 0
    return [x[rows], y[rows], torch.tensor(14.0), torch.tensor([-4.0]), weights[rows]]


def leaves(values, needed, cast=None):
    return [
        z.to(cast or z.dtype).clone().requires_grad_(name in needed) for name, z in zip(INPUTS, values, strict=True)
    ]


def loss_of(functions, of, weighted, **more):
    return functions.siglip_loss(*of[:4], weights=of[4] if weighted else None, **more)


def close(found, true, dtype):
    assert (found.double() - true).norm() <= BOUND[dtype] * true.norm(), (found, true)


@pytest.fixture
def counted_nodes(monkeypatch):
    """Return a list that grows by the sweeps of the node in kernels."""
    made, sweep = [], sigmoid_in_kernels._sweep
    monkeypatch.setattr(sigmoid_in_kernels, "_sweep", lambda *of: (made.append(of[0]), sweep(*of))[1])
    return made


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "memory"), [*zip(BOUND, (4000, "flat", 4000), strict=True)])
@pytest.mark.parametrize("needed", [INPUTS, ("x",), ("y", "bias"), ("scale",), ("bias",), ("weights",), ()])
def test_each_gradient_is_exact(counted_nodes, needed, dtype, weighted, memory):
    """Also in a later call of the form, and in a second backward pass, which sweeps again."""
    if not weighted:
        needed = tuple(name for name in needed if name != "weights")
    of_truth = leaves(inputs(dtype), needed, torch.float64)
    true = loss_of(wb.reference, of_truth, weighted)
    expected = torch.autograd.grad(true, [z for z in of_truth if z.requires_grad]) if needed else []
    for call in range(2):
        of = leaves(inputs(dtype), needed)
        loss = loss_of(wb.functional, of, weighted, kernel="triton", memory=memory)
        close(loss.detach(), true.detach(), torch.float32)
        assert len(counted_nodes) == (2 * call + 1 if needed else call + 1)
        for passes in range(2 if needed else 0):
            grads = torch.autograd.grad(loss * 3, [z for z in of if z.requires_grad], retain_graph=True)
            assert len(counted_nodes) == 2 * call + passes + 1
            for got, exact, name in zip(grads, expected, [n for n in INPUTS if n in needed], strict=True):
                close(got / 3, exact, torch.float32 if name in ("bias", "weights") else dtype)


def test_other_calls_use_the_other_node(counted_nodes):
    x, y, scale, bias, _ = inputs(torch.float32)
    ids = torch.arange(ROWS) // 2
    for more in ({"ids": ids}, {"ids": ids, "equal_ids": "excluded"}, {"reduction": "none"}, {"kernel": "torch"}):
        of_truth, of = leaves(inputs(torch.float32), INPUTS, torch.float64), leaves(inputs(torch.float32), INPUTS)
        options = {"kernel": "triton", **more}
        true = wb.reference.siglip_loss(*of_truth[:4], **{k: v for k, v in more.items() if k != "kernel"})
        loss = wb.functional.siglip_loss(*of[:4], **options)
        for got, exact in zip(
            torch.autograd.grad(loss.sum(), of[:4]), torch.autograd.grad(true.sum(), of_truth[:4]), strict=True
        ):
            close(got, exact, torch.float32)
    wb.functional.siglip_loss(x.double(), y.double(), scale, bias, kernel="triton")
    wb.functional.siglip_loss(x * 1e30, y * 1e30, scale * 0, bias, kernel="triton")
    assert not counted_nodes


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda functions, x, y, scale, bias, **more: functions.siglip_loss(x, y, scale, bias, **more),
        lambda functions, x, y, scale, _, **more: functions.clip_loss(x, y, scale, **more),
    ],
    ids=["siglip", "clip"],
)
def test_rows_of_other_lengths_are_not_rounded_to_float16(loss_of):
    """Under precision="bfloat16" dS is in float16, and so are rows, unless float16 does not hold them."""
    for length in (1.0, 1e6, 1e-6, 1.0):
        values = inputs(torch.bfloat16)
        x, y, scale, bias = (values[0].float() * length, values[1].float(), values[2] / length, values[3])
        of, of_truth = ([z.to(cast).requires_grad_() for z in (x, y)] for cast in (torch.float32, torch.float64))
        loss = loss_of(wb.functional, *of, scale, bias, kernel="triton", precision="bfloat16")
        true = loss_of(wb.reference, *of_truth, scale.double(), bias.double())
        for got, exact in zip(torch.autograd.grad(loss, of), torch.autograd.grad(true, of_truth), strict=True):
            close(got, exact, torch.bfloat16)


def on_ranks():
    rank = torch.distributed.get_rank()
    first = sum(SIZES[:rank])
    local = slice(first, first + SIZES[rank])
    for dtype in BOUND:
        for weighted in (False, True):
            of_truth = leaves(inputs(dtype), INPUTS, torch.float64)
            loss_of(wb.reference, of_truth, weighted).backward()
            for exchange in ("gather", "ring"):
                for _ in range(2):
                    of = leaves(inputs(dtype, local), INPUTS)
                    loss = loss_of(wb.functional, of, weighted, kernel="triton", exchange=exchange)
                    loss.backward()
                    for name, got, true in zip(INPUTS, of, of_truth, strict=True):
                        exact = true.grad if weighted or name != "weights" else None
                        if exact is None:
                            continue
                        mean = {"x": 3, "y": 3, "weights": 3}.get(name)  # engines average the gradients of rows
                        exact = exact[local] * mean if mean else exact
                        if mean:
                            close(got.grad, exact, dtype if name != "weights" else torch.float32)
                            continue
                        total = got.grad.double().clone()
                        torch.distributed.all_reduce(total)
                        close(total / 3, exact, dtype if name == "scale" else torch.float32)


def test_several_ranks_one_of_them_without_rows():
    run_ranks(on_ranks, 3)
