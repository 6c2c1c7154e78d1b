"""A head of sharded classes beside an encoder that FSDP2 shards: the weights of one process."""

import math

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

CLASSES, WIDTH, STEPS = 7, 4, 10
MARGIN = wb.ArcFace(8.0, 0.2)
UNEVEN = {1: (12,), 2: (7, 5), 3: (2, 6, 4)}


def encoder():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def make_head(rate=1.0):
    return wb.PartialFC(WIDTH, CLASSES, margin=MARGIN, sample_rate=rate, dtype=torch.float64, seed=5)


def batches():
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        yield x, torch.randint(CLASSES, (12,), generator=generator)


def train(model, loss_of, parameters, clip=None, rate=1.0, rows=slice(None)):
    """Make ten steps; `clip` is called between the backward pass and the optimizer's step."""
    optimizer = (wb.SparseSGD if rate < 1 else torch.optim.SGD)(parameters, lr=0.1, momentum=0.9)
    for x, y in batches():
        loss_of(model(x[rows]), y[rows]).backward()
        if clip is not None:
            clip()
        optimizer.step()
        optimizer.zero_grad()


def true_weights(clip=None, rate=1.0):
    """Return the weights of one process: with all classes those of a dense reference."""
    model, head = encoder(), make_head(rate)
    start = [p.detach().clone() for p in model.parameters()]

    def dense(z, y):
        return wb.reference.partial_fc_loss(z, y, head.weight, margin=MARGIN)

    parameters = [*model.parameters(), head.weight]
    norm = None if clip is None else lambda: wb.heads.clip_grad_norm_(parameters, [], clip)
    train(model, dense if rate == 1 else head, parameters, norm, rate)
    assert all((p - before).norm() > 1e-3 for p, before in zip(model.parameters(), start, strict=True))
    return [p.detach() for p in model.parameters()], head.weight.detach()


def sharded_body(units, rate, clip, factor=1.0):
    world, rank = dist.get_world_size(), dist.get_rank()
    model, head, mesh = encoder(), make_head(rate), init_device_mesh("cpu", (world,))
    for unit in (model[0], model[2]) if units else ():
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parameters = [*model.parameters(), *head.parameters()]
    norm = None if clip is None else lambda: wb.heads.clip_grad_norm_(model.parameters(), head.parameters(), clip)
    train(model, lambda z, y: factor * head(z, y), parameters, norm, rate, rows=Partition(UNEVEN[world]).rows(rank))
    return [p.detach().full_tensor() for p in model.parameters()], head.weight.detach()


@pytest.mark.parametrize(("units", "rate", "clip"), [(False, 1.0, None), (True, 1.0, 0.1), (True, 0.4, None)])
@pytest.mark.parametrize("world", [2, 3])
def test_an_encoder_under_fsdp2_ends_with_the_weights_of_one_process(world, units, rate, clip):
    true, centers = true_weights(clip, rate)
    found = run_ranks(sharded_body, world, units, rate, clip, timeout_s=120)
    for weights, _ in found:
        for weight, expected in zip(weights, true, strict=True):
            assert_same(weight, expected, relative=1e-12)
    assert_same(torch.cat([rows for _, rows in found]), centers, relative=1e-12)


def norms_body(mesh_shape):
    """The norm of a gradient in parts of a mesh with one or two axes is that of plain gradients."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    names = ("replicas", "shards")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    placements = [Replicate(), Shard(0)][-len(mesh_shape) :]
    generator = torch.Generator().manual_seed(0)
    plain, parts = [], []
    for shape in ((5, 3), (1, 2), (4,)):
        whole = torch.randn(shape, generator=generator, dtype=torch.float64)
        for found, x in ((plain, whole.clone()), (parts, distribute_tensor(whole, mesh, placements))):
            found.append(nn.Parameter(torch.zeros_like(x)))
            found[-1].grad = x
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other.grad = torch.full_like(other, 1.0 + dist.get_rank())
    true = wb.heads.clip_grad_norm_(plain, [other], 0.5)
    other.grad = torch.full_like(other, 1.0 + dist.get_rank())
    assert_same(wb.heads.clip_grad_norm_(parts, [other], 0.5), true, relative=1e-14)
    for x, p in zip(plain, parts, strict=True):
        assert_same(p.grad.full_tensor(), x.grad, relative=1e-14)
    with pytest.raises(ValueError, match=r"sharded must hold no DTensors, .*; pass .* as replicated"):
        wb.heads.clip_grad_norm_([], parts if dist.get_rank() else [other], 0.5)
    addends = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate()] * mesh.ndim))
    addends.grad = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()] * mesh.ndim)
    with pytest.raises(ValueError, match="replicated must hold no DTensor with a Partial placement, got one"):
        wb.heads.clip_grad_norm_([addends] if dist.get_rank() else [other], [], 0.5)
    other.grad = torch.tensor([math.inf, 3.0], dtype=torch.float64)
    assert wb.heads.clip_grad_norm_([other], [], math.inf) == math.inf
    assert other.grad[1] == 3.0


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2)])
def test_parts_of_a_gradient_add_up_over_their_mesh(mesh_shape):
    run_ranks(norms_body, math.prod(mesh_shape), mesh_shape, timeout_s=60)


@pytest.mark.planted
def test_a_factor_of_the_number_of_processes_ends_elsewhere():
    true, _ = true_weights()
    weights, _ = run_ranks(sharded_body, 2, False, 1.0, None, 2.0, timeout_s=120)[0]
    with pytest.raises(AssertionError):
        assert_same(weights[0], true[0], relative=1e-3)
