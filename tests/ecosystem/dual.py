"""For tests of trainers: a dual encoder, its data and loss, launched ranks, finished runs, a count of reductions."""

import os
import socket
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from ddp import counting
from torch import nn
from torch.nn.functional import normalize

import wholebatch as wb

BATCH, CHUNK, STEPS, MICRO_STEPS = 4, 3, 20, 4  # rows of a rank's batch; a batch is two chunks
REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")


class Dual(nn.Module):
    """Two encoders and a learned scale."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.queries = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.keys = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4))
        self.scale = wb.Scale(5.0)
        self.to(dtype)

    def forward(self, x, y):
        return normalize(self.queries(x), dim=1), normalize(self.keys(y), dim=1), self.scale()


def loss_fn(features):
    x, y, scale = features
    return wb.functional.clip_loss(x, y, scale)


def plain(model, batch):
    return model(**batch)


def cached(model, batch):
    return wb.gradcache.encode(model, batch, CHUNK)


class Pairs(torch.utils.data.Dataset):
    """Pairs of random numbers."""

    def __init__(self, count, dtype=torch.float64):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randn(count, 5, generator=generator, dtype=torch.float64).to(dtype)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, row):
        return {"x": self.x[row], "y": self.y[row]}


@dataclass
class Run:
    """A finished training: weights at start and end, the losses, and how often gradients were reduced."""

    start: torch.Tensor
    weights: torch.Tensor
    losses: list
    reductions: int = 0


def distance(found, true):
    """Return how far a run ends from another, relative to the way that the latter has gone."""
    return ((found.weights - true.weights).norm() / (true.weights - true.start).norm()).item()


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def as_launched(port):
    """Set the environment as torchrun does."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "none"}


def reductions_counted():
    """Return a list that grows by one for each collective that sums tensors, except those of wholebatch itself.

    DDP reduces outside of Python: each instance that is made from now on gets a hook, which calls `all_reduce`.
    """
    found = []

    def counted(name):
        original = getattr(dist, name)

        def call(*args, **kwargs):
            if not _in_wholebatch(sys._getframe(1)):
                found.append(name)
            return original(*args, **kwargs)

        return call

    for name in REDUCING:
        if hasattr(dist, name):
            setattr(dist, name, counted(name))
    made = nn.parallel.DistributedDataParallel.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        counting(self)

    nn.parallel.DistributedDataParallel.__init__ = make
    return found


def _in_wholebatch(frame):
    """Return whether the innermost frame of wholebatch is in its communication, which decorates whole steps, too."""
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("wholebatch."):
            return name.startswith("wholebatch.comm")
        frame = frame.f_back
    return False


def weights(model):
    """Return all parameters in one tensor, whole ones of shards."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(model):  # does nothing without FSDP1
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return torch.cat([p.detach().flatten().double() for p in whole])


def assert_same_training(found, true, tolerance=1e-10):
    """Compare the weights and reductions of all ranks with those of training without caching."""
    start = weights(Dual())
    for (w, reductions), (w_true, reductions_true) in zip(found, true, strict=True):
        assert (w_true - start).norm() > 0.1 * start.norm(), "nothing was trained"
        assert (w - w_true).norm() <= tolerance * w_true.norm()
        assert torch.equal(w, found[0][0])
        assert reductions == reductions_true > 0
