"""Losses, PartialFC, gradient caching and collectives on ranks, with tensors of the GPU where there is one.

One rank is a group of NCCL there; two ranks share the GPU and talk over gloo, because NCCL refuses them. Values and
gradients are compared with those of the dense reference in float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.comm import select_communicator
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, CLASSES, SCALE, BIAS = 32, 101, 20.0, -5.0
# Relative errors of gradients: 10 times the rounding of one number, for sums of some hundred.
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
# Of sums in float32, and of factors of 24, 10, 10 and 7 bits in a softmax of scale 20.
PRECISIONS = {"auto": 1e-4, "float32": 1e-4, "bfloat16x3": 3e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 0.1}


def relative(found, true):
    found, true = found.double().cpu(), true.detach().double().cpu()
    return ((found - true).norm() / true.norm()).item()


def towers(counts, dtype):
    """Return the features of all ranks: pairs that are similar, as after a part of a training."""
    generator = torch.Generator().manual_seed(0)
    x, noise = (
        normalize(torch.randn(sum(counts), SIZE, dtype=torch.float64, generator=generator), dim=1) for _ in range(2)
    )
    return x.to(dtype), normalize(0.4 * x + 0.6 * noise, dim=1).to(dtype)


# Each case is a function of the ranks' numbers of rows that returns tensors of this rank, and one that compares them.

LOSSES = {
    "clip": lambda of, x, y, **more: of.clip_loss(x, y, SCALE, **more),
    "siglip": lambda of, x, y, **more: of.siglip_loss(x, y, SCALE, BIAS, **more),
    "info_nce": lambda of, x, y, **more: of.info_nce_loss(x, y, logit_scale=SCALE, **more),
    "nt_xent": lambda of, x, y, **more: of.nt_xent_loss(x, y, temperature=1 / SCALE, **more),
}


def loss_part(counts, loss, dtype, **more):
    rank = select_communicator(None).rank
    x, y = (z.split(counts)[rank].to(DEVICE).requires_grad_() for z in towers(counts, dtype))
    value = LOSSES[loss](wb.functional, x, y, sync="sum", **more)
    value.backward()
    return {"loss": value.detach(), "x": x.grad, "y": y.grad}


def loss_errors(parts, counts, loss, dtype, **more):
    x, y = (z.to(DEVICE).double().requires_grad_() for z in towers(counts, dtype))
    true = LOSSES[loss](wb.reference, x, y)
    grads = torch.autograd.grad(true, (x, y))
    found = [torch.cat([part[name] for part in parts]) for name in ("x", "y")]
    return [*(relative(part["loss"], true) for part in parts), *map(relative, found, grads)]


def labels_of(counts):
    return torch.randint(CLASSES, (sum(counts),), generator=torch.Generator().manual_seed(1))


def partial_fc_part(counts, dtype, precision, sample_rate):
    rank = select_communicator(None).rank
    settings = {"sample_rate": sample_rate, "precision": precision, "dtype": dtype, "device": DEVICE, "sync": "sum"}
    head = wb.PartialFC(SIZE, CLASSES, margin=wb.ArcFace(SCALE, 0.3), **settings)
    x = towers(counts, dtype)[0].split(counts)[rank].to(DEVICE).requires_grad_()
    value = head(x, labels_of(counts).split(counts)[rank].to(DEVICE))
    value.backward()
    grad = head.weight.grad
    rows = grad.coalesce().indices()[0] if grad.is_sparse else torch.arange(len(grad), device=DEVICE)
    return {
        "loss": value.detach(), "x": x.grad, "centers": head.weight.detach(), "of_centers": grad.to_dense(),
        "classes": head.local_classes.start + rows,
    }  # fmt: skip


def partial_fc_errors(parts, counts, dtype, precision, sample_rate):
    """The loss is over the classes that took part."""
    names = ("x", "centers", "of_centers", "classes")
    of_x, centers, of_centers, classes = (torch.cat([part[name].cpu() for part in parts]) for name in names)
    x, centers = towers(counts, dtype)[0].double().requires_grad_(), centers.double().requires_grad_()
    margin = wb.ArcFace(SCALE, 0.3)
    true = wb.reference.partial_fc_loss(x, labels_of(counts), centers[classes], margin=margin, class_ids=classes)
    grads = torch.autograd.grad(true, (x, centers))
    return [*(relative(part["loss"], true) for part in parts), *map(relative, (of_x, of_centers), grads)]


def rows_of(counts):
    return [Partition(tuple(counts)).rows(rank) for rank in range(len(counts))]


# Each collective, the rows of its input on a rank, and its results on all ranks by plain PyTorch.
COLLECTIVES = {
    "all_gather": (
        lambda comm, x, counts: comm.all_gather(x, counts=counts),
        lambda counts, rank: counts[rank],
        lambda xs, counts: [torch.cat(xs)] * len(xs),
    ),
    "reduce_scatter": (
        lambda comm, x, counts: comm.reduce_scatter(x, counts=counts),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.stack(xs).sum(0)[rows] for rows in rows_of(counts)],
    ),
    "all_reduce": (
        lambda comm, x, counts: comm.all_reduce(x),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.stack(xs).sum(0)] * len(xs),
    ),
    "broadcast": (
        lambda comm, x, counts: comm.broadcast(x, comm.size - 1),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [xs[-1]] * len(xs),
    ),
    "all_to_all": (  # each rank sends counts[q] rows to rank q
        lambda comm, x, counts: comm.all_to_all(x, send_counts=counts),
        lambda counts, rank: sum(counts),
        lambda xs, counts: [torch.cat([x[rows] for x in xs]) for rows in rows_of(counts)],
    ),
}


def collective_part(counts, operation, dtype):
    """The gradient is that of a random cotangent."""
    comm = select_communicator(None)
    call, rows, _ = COLLECTIVES[operation]
    generator = torch.Generator().manual_seed(comm.rank)
    x = torch.randn(rows(counts, comm.rank), 3, dtype=torch.float64, generator=generator).to(DEVICE, dtype)
    out = call(comm, x.requires_grad_(), counts)
    cotangent = torch.randn(out.shape, dtype=torch.float64, generator=generator).to(out)
    comm.backward(out, cotangent)
    return {"x": x.detach(), "out": out.detach(), "cotangent": cotangent, "grad": x.grad}


def collective_errors(parts, counts, operation, dtype):
    """The adjoint is the gradient of the sum of all <result, cotangent>."""
    xs = [part["x"].double().cpu().requires_grad_() for part in parts]
    outs = COLLECTIVES[operation][2](xs, counts)
    total = sum((out * part["cotangent"].double().cpu()).sum() for out, part in zip(outs, parts, strict=True))
    grads = torch.autograd.grad(total, xs, allow_unused=True, materialize_grads=True)
    found = [torch.cat([part[name] for part in parts]) for name in ("out", "grad")]
    return [*map(relative, found, (torch.cat(outs), torch.cat(grads)))]


CASES = {  # the two functions, options and the largest error, by kind
    "collectives": [
        (collective_part, collective_errors, {"operation": name, "dtype": dtype}, bound)
        for name in COLLECTIVES
        for dtype, bound in ROUNDING.items()
    ],
    "losses": [
        (loss_part, loss_errors, {"loss": name, "dtype": dtype, "memory": memory}, bound)
        for name in LOSSES
        for dtype, bound in ROUNDING.items()
        for memory in ("auto", "flat")
    ],
    "precisions of losses": [
        (loss_part, loss_errors, {"loss": name, "dtype": torch.float32, "precision": precision}, bound)
        for name in LOSSES
        for precision, bound in PRECISIONS.items()
    ],
    "PartialFC": [
        (
            partial_fc_part, partial_fc_errors,
            {"dtype": dtype, "precision": precision, "sample_rate": rate}, bound,
        )
        for dtype, precision, bound in
        [(torch.float64, "auto", ROUNDING[torch.float64]), *((torch.float32, *of) for of in PRECISIONS.items())]
        for rate in (1.0, 0.3)
    ],
}  # fmt: skip


def parts_of(cases, counts):
    """Return this rank's tensors of all cases."""
    return [part(counts, **options) for part, _, options, _ in cases]


def wrong_cases(cases, counts):
    """Return the options and errors of the cases with a larger error than allowed."""
    backend = "nccl" if DEVICE.type == "cuda" and len(counts) == 1 else "gloo"
    ranks = run_ranks(parts_of, len(counts), cases, counts, backend=backend, timeout_s=120)
    found = []
    for case, parts in zip(cases, zip(*ranks, strict=True), strict=True):
        _, errors, options, bound = case
        of_case = errors(parts, counts, **options)
        found += [] if all(error <= bound for error in of_case) else [(options, of_case)]
    return found


@pytest.mark.parametrize("counts", [(70,), (44, 26)], ids=str)
@pytest.mark.parametrize("kind", CASES)
def test_values_and_gradients_on_ranks(kind, counts):
    assert not wrong_cases(CASES[kind], counts)


def twice_the_gradient(counts, **options):
    part = loss_part(counts, **options)
    return {**part, "x": 2 * part["x"]}


@pytest.mark.planted
def test_a_wrong_gradient_is_noticed():
    right, *_ = CASES["losses"]
    _, *others = right
    ((options, _),) = wrong_cases([right, (twice_the_gradient, *others)], (4, 3))
    assert options["loss"] == "clip"


@pytest.mark.parametrize("loss", LOSSES)
def test_several_tiles(loss):
    counts, options = (9000 if DEVICE.type == "cuda" else 1100,), {"dtype": torch.float32, "memory": "flat"}
    part = loss_part(counts, loss, **options)
    assert max(loss_errors([part], counts, loss, **options)) < ROUNDING[torch.float32]


def tower():
    generator = torch.Generator().manual_seed(2)
    layers = [torch.nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(2)]
    for parameter in (p for layer in layers for p in layer.parameters()):
        parameter.data = torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / math.sqrt(SIZE)
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])


def flat_gradient(module):
    return torch.cat([p.grad.flatten() for p in module.parameters()])


@pytest.mark.parametrize(
    ("precision", "autocast", "bound"),
    [*((name, False, bound) for name, bound in PRECISIONS.items()), ("auto", True, PRECISIONS["bfloat16"])],
)
def test_gradient_caching(precision, autocast, bound):
    plain, model = tower(), tower().float().to(DEVICE)
    x, y = towers((70,), torch.float32)
    wb.reference.clip_loss(*(normalize(plain(z.double()), dim=1) for z in (x, y)), SCALE).backward()
    loss = wb.CLIPLoss(precision=precision)
    cached = wb.GradCache([model, model], 16, lambda a, b: loss(normalize(a, dim=1), normalize(b, dim=1), SCALE))
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast):
        cached(x.to(DEVICE), y.to(DEVICE))
    assert relative(flat_gradient(model), flat_gradient(plain)) < bound
