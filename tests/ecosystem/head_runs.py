"""For tests of Lightning and Fabric with a head of sharded classes: a model, its data, and training in one process.

One process computes the loss of the whole batch, densely: `wb.reference.partial_fc_loss` and autograd.
"""

import torch
import torch.distributed as dist
from torch import nn

import wholebatch as wb
from wholebatch.partition import Partition

CLASSES, WIDTH, ROWS, STEPS = 7, 4, 12, 20
MARGIN = wb.ArcFace(8.0, 0.2)
UNEVEN = {1: (12,), 2: (7, 5), 3: (2, 6, 4)}  # rows of each rank


def whole_batches(micro_steps=1):
    """Return the batches of one epoch, half of the steps; both epochs have the same."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS // 2 * micro_steps
    x = torch.randn(count, ROWS, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(CLASSES, (count, ROWS), generator=generator)
    return [*zip(x, y, strict=True)]


def local_batches(micro_steps=1):
    """Return this rank's rows of the batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = Partition(UNEVEN[world]).rows(rank)
    return [(x[rows], y[rows]) for x, y in whole_batches(micro_steps)]


def backbone():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def make_head(rate=1.0, classes=CLASSES, **settings):
    return wb.PartialFC(WIDTH, classes, margin=MARGIN, sample_rate=rate, dtype=torch.float64, seed=5, **settings)


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
    "SparseSGD": lambda parameters: wb.SparseSGD(parameters, lr=0.1, momentum=0.9),
    "SparseAdamW": lambda parameters: wb.SparseAdamW(parameters, lr=0.02),
}


class Model(nn.Module):
    """A backbone with a head as an attribute."""

    def __init__(self, rate=1.0, classes=CLASSES):
        super().__init__()
        self.backbone, self.head = backbone(), make_head(rate, classes)

    def forward(self, x, y):
        return self.head(self.backbone(x), y)


class Dense(nn.Module):
    """The same with all centers in one process, and dense logits."""

    def __init__(self):
        super().__init__()
        self.backbone, self.weight = backbone(), nn.Parameter(make_head().weight.detach())

    def forward(self, x, y):
        return wb.reference.partial_fc_loss(self.backbone(x), y, self.weight, margin=MARGIN)


def vector(model, centers):
    """Return the weights of a backbone and the centers in one vector."""
    return torch.cat([p.detach().flatten() for p in (*model.backbone.parameters(), centers)])


def whole_vector(model):
    """Return all weights on rank 0, and those of the backbone on others."""
    centers = model.head.full_weight()
    return vector(model, torch.empty(0, dtype=torch.float64) if centers is None else centers)


def true_weights(optimizer="SGD", rate=1.0, micro_steps=1, clip=None, by_value=False):
    """Return the weights before and after training in one process without a framework."""
    model = Model(rate) if rate < 1 else Dense()
    centers = model.head.weight if rate < 1 else model.weight
    start = vector(model, centers)
    one = OPTIMIZERS[optimizer](model.parameters())
    batches = whole_batches(micro_steps) * 2
    for step in range(STEPS):
        for x, y in batches[step * micro_steps :][:micro_steps]:
            (model(x, y) / micro_steps).backward()
        if clip is not None and by_value:
            nn.utils.clip_grad_value_(model.parameters(), clip)
        elif clip is not None and rate < 1:
            wb.heads.clip_grad_norm_(model.parameters(), [], clip)
        elif clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        one.step()
        one.zero_grad()
    return start, vector(model, centers)


def distance(found, true):
    """Return the distance from the true weights, divided by the way that training has moved them."""
    start, end = (x[: len(found)] for x in true)
    return ((found - end).norm() / (end - start).norm()).item()
