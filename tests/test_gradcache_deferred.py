"""A deferred loss, whose backward pass the caller makes: deferred = immediate = uncached.

The truth is one process with all rows and the same chunks, whose graphs are all kept: masks of dropout and statistics
of BatchNorm are those of a chunk.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from gradcache_models import (
    OUT,
    Clip,
    D,
    assert_all_times,
    batch,
    good_loss,
    gradients_of,
    mlp,
)
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

COUNTS = [(6,), (5, 2), (4, 0, 3)]
SIZE = 2
FORMS = {"immediate": 1.0, "kept": 1.0, "deferred": 3.7, "deferred and kept": 3.7, "encode": 3.7}  # incoming gradients


class LoRA(nn.Module):
    """A frozen layer with a trained update of low rank."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, layer.in_features, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(layer.out_features, 2, dtype=torch.float64))

    def forward(self, x):
        return self.layer(x) + nn.functional.dropout(x, 0.2, self.training) @ self.a.T @ self.b.T


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.rest, self.reentrant = (
            nn.Linear(D, 8),
            nn.Sequential(nn.Dropout(0.2), nn.Linear(8, OUT)),
            reentrant,
        )
        self.double()

    def forward(self, x):
        return checkpoint(self.rest, self.first(x).tanh(), use_reentrant=self.reentrant)


def lora():
    model = mlp(2)
    model[0] = LoRA(model[0])
    return model


def tied():
    one = mlp(0, nn.Dropout(0.3))
    return [one, one]


def seeded(make):
    torch.manual_seed(3)
    return make()


MODELS = {
    "plain": lambda: [mlp(0), mlp(1)],
    "dropout": lambda: [mlp(0, nn.Dropout(0.4)), mlp(1, nn.Dropout(0.2))],
    "batch norm": lambda: [mlp(0, nn.BatchNorm1d(8, affine=True).double()), mlp(1)],
    "tied": tied,
    "lora": lambda: [seeded(lora), mlp(1)],
    "frozen": lambda: [mlp(0).requires_grad_(False), mlp(1)],
    "checkpoint": lambda: [seeded(lambda: Checkpointed(False)), seeded(lambda: Checkpointed(True))],
}


def graphed(models, inputs, seed):
    """Return the representations of the chunks of a rank's batch, with all graphs."""
    torch.manual_seed(seed)
    return [
        torch.cat([model(part) for part in (z.split(SIZE) if len(z) else [z])])
        for model, z in zip(models, inputs, strict=True)
    ]


def of_all_ranks(models, inputs, counts):
    """Return the representations of all ranks' rows, rank 0's first."""
    rows = [Partition(counts).rows(rank) for rank in range(len(counts))]
    parts = [graphed(models, [z[at] for z in inputs], seed) for seed, at in enumerate(rows)]
    return [torch.cat(tower) for tower in zip(*parts, strict=True)]


def distinct(models):
    return [*{id(model): model for model in models}.values()]


def wrapped(models):
    """Return the models under DDP, those without gradient as they are."""
    engines = {id(m): DistributedDataParallel(m) if any(p.requires_grad for p in m.parameters()) else m for m in models}
    return [engines[id(m)] for m in models]


def forms_body(kind, counts):
    """One model of each kind, in each form of the step: the loss and all gradients are those of the whole batch."""
    rank = dist.get_rank()
    if kind == "batch norm":
        counts = [rows - rows % SIZE for rows in counts]  # one row has no variance
    inputs = batch(sum(counts))
    local = [z[Partition(counts).rows(rank)] for z in inputs]
    plain, loss_fn = MODELS[kind](), Clip()
    if kind == "batch norm" and 0 in counts:
        plain[0][2].eval()  # it has no statistics of no rows
    dense, alone = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    expected = wb.reference.clip_loss(
        *(normalize(z, dim=1) for z in of_all_ranks(dense, inputs, counts)), alone.log_scale.exp()
    )
    expected.backward()
    true = gradients_of(*distinct(dense), alone)
    assert any(z is not None and z.abs().max() > 1e-6 for z in true)
    models, engine = wrapped(plain), DistributedDataParallel(loss_fn)
    reduced = [counting(m) for m in distinct(models) if isinstance(m, DistributedDataParallel)]
    frozen = kind == "frozen"  # a frozen tower goes to the loss as it is

    def encoded():
        parts = [
            m(z) if frozen and not at else wb.gradcache.encode(m, z, SIZE)
            for at, (m, z) in enumerate(zip(models, local, strict=True))
        ]
        return engine(*parts)

    def step(**options):
        if not frozen:
            return wb.GradCache(models, SIZE, engine, **options)(*local)
        return wb.GradCache(models[1:], SIZE, lambda b, a: engine(a, b), **options)(local[1], a=models[0](local[0]))

    for name, factor in FORMS.items():  # after the first, DDP has rebuilt its buckets
        torch.manual_seed(rank)
        if name == "encode":
            loss = encoded()
        else:
            loss = step(deferred="deferred" in name, keep_graphs=1.0 if "kept" in name else 0)
        assert loss.requires_grad == (factor != 1.0)
        if loss.requires_grad:
            (factor * loss).backward(retain_graph="kept" in name)
        assert_same(loss, expected, relative=1e-12, what=name)
        assert_all_times(gradients_of(*distinct(plain), loss_fn), true, factor)
        for buckets in reduced:
            assert buckets == [0], (name, buckets)
            buckets.clear()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_deferred_immediate_and_uncached_steps_are_one_gradient(kind, counts):
    run_ranks(forms_body, len(counts), kind, counts, timeout_s=120)


def scaler_body():
    """A step that overflows is skipped, and the next ones are as if it had not been."""
    rank = dist.get_rank()
    rows = Partition((5, 2)).rows(rank)
    x, y = batch(7)
    start = mlp(0).float()
    x, y, weights = x.float(), y.float(), []
    for cached in (True, False):
        model = DistributedDataParallel(copy.deepcopy(start))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        step = wb.GradCache([model, model], SIZE, good_loss, deferred=True)
        scales = []
        for k in range(4):
            factor = torch.inf if k == 1 else 1.0
            loss = step(x[rows], y[rows]) if cached else good_loss(model(x[rows]), model(y[rows]))
            if k == 1:
                loss = loss * factor
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        assert scales == [1024.0, 512.0, 512.0, 512.0], "the second step was skipped"
        weights.append([p.detach().clone() for p in model.parameters()])
    for ours, true in zip(*weights, strict=True):
        assert_same(ours, true, relative=1e-5)


def test_a_scaler_skips_a_step_and_gradients_are_clipped():
    run_ranks(scaler_body, 2, timeout_s=60)
