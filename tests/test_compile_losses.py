"""Losses inside compiled graphs: fullgraph=True takes them, and values and gradients are those of eager calls, bit for bit."""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from compare import assert_same
from loss_cases import BIAS, LOSSES, rows_of, whole_batch
from torch import nn

import wholebatch as wb
from wholebatch.contract import in_graph
from wholebatch.testing import run_ranks

ONE_EACH = {call.split(",")[0]: name for name, call in reversed([(name, name) for name in LOSSES])}
NAMES = [*ONE_EACH.values(), "clip, ids, weights", "info_nce, hard negatives, margin, hardness, weights"]
NAMES.remove("global contrastive")  # its function returns a tuple; the module is below
COUNTS = {1: [(7,), (5,)], 2: [(4, 4), (5, 2)]}


def compiled(step, backend="aot_eager", **options):
    torch._dynamo.reset()
    return torch.compile(step, backend=backend, fullgraph=True, **options)


def results_of(step, leaves):
    """Return the value of a step and the gradients of its leaves."""
    for x in leaves:
        x.grad = None
    value = step()
    value.backward()
    return [value.detach(), *(x.grad for x in leaves)]


def assert_equal(results, expected, what):
    for position, (x, y) in enumerate(zip(results, expected, strict=True)):
        assert x.dtype == y.dtype, what
        assert torch.equal(x, y), f"{what}: {position}: {(x - y).abs().max():.3g}"


def functions_body(names):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in names:
        case = LOSSES[name]

        def step(tensors, scale, bias, case=case):
            tensors = [1.5 * x if x.is_floating_point() else x for x in tensors]  # so that features are no leaves
            return 2.0 * case.call(wb.functional, *tensors, scale, bias)

        run = compiled(step)
        for counts in COUNTS[world]:  # a second call has other numbers of rows
            inputs = whole_batch(case, counts)
            mine = [x[rows] for x, rows in zip(inputs, rows_of(case, counts, rank), strict=True)]
            leaves = [mine[position].requires_grad_() for position in case.differentiable]
            scale, bias = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (5.0, BIAS))
            leaves += [scale] * case.has_scale + [bias] * case.has_bias
            expected = results_of(lambda: step(mine, scale, bias), leaves)
            assert_equal(results_of(lambda: run(mine, scale, bias), leaves), expected, f"{name}, {counts}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("names", [NAMES[0::3], NAMES[1::3], NAMES[2::3]], ids=lambda names: names[0])
def test_functions_are_exact(world, names):
    run_ranks(functions_body, world, names, timeout_s=300)


class Model(nn.Module):
    """An encoder and losses with and without parameters and state of their own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.scale = nn.Linear(4, 6), wb.Scale(5.0)
        self.clip, self.siglip = wb.CLIPLoss(), wb.SigLIPLoss(logit_scale=wb.Scale(3.0), logit_bias=nn.Parameter(torch.tensor(-2.0)))
        self.contrastive = wb.GlobalContrastiveLoss(20)
        self.head = wb.PartialFC(6, 10, margin=wb.ArcFace(16.0, 0.3))
        self.head_with_state = wb.PartialFC(6, 10, margin=wb.AdaFace())
        self.pairs = wb.PairLoss(
            {
                "all": wb.LogSumExp(lambda s, x, y, p: p.scale * s + y.bias),
                "own": wb.Partner(lambda s, x, y, p: p.scale * s + y.bias),
            },
            lambda r, x, p: r.all - r.own,
            parameters={"scale": wb.Scale(4.0)},
        )

    def forward(self, x, y, bias, labels):
        x, y = (nn.functional.normalize(self.encoder(z), dim=1) for z in (x, y))
        return torch.stack(
            [
                self.clip(x, y, self.scale(), ids=labels),
                self.siglip(x, y),
                self.contrastive(x, y, labels),
                self.head(x, labels),
                self.head_with_state(y, labels),
                self.pairs(x, y, y_data={"bias": bias}),
                wb.functional.nt_xent_loss(x, y, temperature=0.2, sync="sum"),
                wb.functional.clip_loss(x, y, 7.0, reduction="none").square().sum(),
            ]
        )


def modules_body(dtype):
    world = dist.get_world_size()
    torch.manual_seed(0)
    models = [Model(), Model()]
    models[1].load_state_dict(models[0].state_dict())
    run = compiled(models[1], dynamic=None)
    weights = torch.linspace(0.5, 2.0, 8)
    torch.manual_seed(dist.get_rank())
    for rows in (4, 4, 5, 3):
        x, y, bias = torch.randn(rows, 4), torch.randn(rows, 4), torch.randn(rows)
        labels = torch.randperm(10)[:rows]
        results = []
        for model, step in zip(models, (models[0], run), strict=True):
            leaf = bias.clone().requires_grad_()
            with torch.autocast("cpu", dtype) if dtype else nullcontext():
                values = step(x, y, leaf, labels)
            total, *gradients = results_of(lambda values=values: values @ weights, [*model.parameters(), leaf])
            results.append([values.detach(), total, *gradients[2:], *model.buffers(), *gradients[:2]])
        for actual, expected in zip(results[1][-2:], results[0][-2:], strict=True):
            # of the encoder, whose own derivative the compiler writes in another way
            assert_same(actual, expected, relative=1e-2 if dtype else 1e-5, what=f"{world}, {rows}")
        assert_equal(results[1][:-2], results[0][:-2], f"{world}, {rows}")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_modules_are_exact(world, dtype):
    run_ranks(modules_body, world, dtype, timeout_s=300)
