"""Encoders, losses and comparators for the tests of gradient caching."""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from compare import assert_same
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import normalize

import wholebatch as wb

D, OUT = 5, 4


def mlp(seed, *middle):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), *middle, nn.Linear(8, OUT)).double()


class Clip(nn.Module):
    """CLIP's loss with a learned scale."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, y, **options):
        x, y = (normalize(z, dim=1) for z in (x, y))
        return wb.functional.clip_loss(x, y, self.log_scale.exp(), **options)


def batch(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, D, dtype=torch.float64, generator=generator) for _ in range(2)]


def gradients_of(*modules):
    """Return the gradients by name, None where there is none, and clear them."""
    found = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    return found


def assert_all_same(got, expected, relative=1e-10):
    assert len(got) == len(expected)
    assert any(z is not None for z in expected)
    for z, true in zip(got, expected, strict=True):
        assert (z is None) == (true is None)
        if true is not None:
            assert_same(z, true, relative=relative)


def assert_all_times(got, expected, factor=1.0):
    """The gradients are `factor` times the expected ones, up to rounding of the largest."""
    largest = max(z.abs().max().item() for z in expected if z is not None)
    for z, true in zip(got, expected, strict=True):
        assert (z is None) == (true is None)
        if true is not None:
            assert_same(z, factor * true, relative=1e-10, absolute=1e-13 * factor * largest)


class TwoParts(nn.Module):
    """An encoder with two representations and one scale for the whole batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = mlp(0), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x):
        z = self.inner(x)
        return z, z[:, :2].square(), self.scale


class LateMaximum(nn.Module):
    """A running maximum that the output depends on and that a chunk with larger entries changes.

    The gradient needs the old value: a copy of it, or the tensor that later chunks overwrite.
    """

    def __init__(self, copied=True):
        super().__init__()
        self.copied = copied
        self.register_buffer("largest", torch.ones((), dtype=torch.float64))

    def forward(self, z):
        with torch.no_grad():
            self.largest.copy_(torch.maximum(self.largest, z.abs().max()))
        return z / (self.largest.clone() if self.copied else self.largest)


def gradients_of_kept(*modules):
    return [p.grad for module in modules for p in module.parameters()]


def sharded(module, *parts):
    """Shard by FSDP2 over all ranks: each part by itself, then the rest."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in parts:
        fully_shard(part, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def dense_gradients(model, x, y):
    """Return the gradients of the whole batch on one process."""
    wb.reference.clip_loss(model(x), model(y), 1.0).backward()
    return gradients_of_kept(model)


@contextmanager
def reductions():
    """Yield a list of one number that counts the groups of parameters that FSDP2 reduces."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    reduce, count = _fsdp_param_group.foreach_reduce, [0]

    def counted(*args, **kwargs):
        count[0] += 1
        return reduce(*args, **kwargs)

    _fsdp_param_group.foreach_reduce = counted
    try:
        yield count
    finally:
        _fsdp_param_group.foreach_reduce = reduce


def good_loss(a, b):
    return wb.functional.clip_loss(a, b, 1.0)
