"""Two towers, their data and their true gradient, for tests of gradients that no engine reduces."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition

D, OUT = 5, 4


class Towers(nn.Module):
    """A CLIP model whose forward takes either input, or both."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.image, self.text = (
            nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, OUT)).double() for _ in range(2)
        )

    def forward(self, x=None, y=None):
        return None if x is None else self.image(x), None if y is None else self.text(y)


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, D, dtype=torch.float64, generator=generator) for _ in range(2)]


def loss_fn(a, b):
    return wb.functional.clip_loss(normalize(a, dim=1), normalize(b, dim=1), 5.0)


def local_rows(counts):
    rows = Partition(counts).rows(dist.get_rank())
    return [z[rows] for z in batch(sum(counts))]


def without_checks(monkeypatch):
    """Turn off the checks for unreduced gradients and for parameters that drift apart."""
    monkeypatch.setattr("wholebatch.gradcache.step.check_not_passed_by", lambda *_: None)
    monkeypatch.setattr("wholebatch.gradcache.same_parameters.History.due", lambda _: False)


class OfSubclass(DistributedDataParallel):
    """A subclass of DDP, as frameworks define one."""
