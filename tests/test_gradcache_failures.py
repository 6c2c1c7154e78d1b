"""A second pass that raises on one rank: all ranks raise, gradients are as before, and the next step is right."""

import pytest
import torch
import torch.distributed as dist
from gradcache_models import assert_all_same, batch, dense_gradients, good_loss, gradients_of, mlp
from torch import nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

CHUNKS = 3  # of each of two models, on each rank


class RaisesBackward(Function):
    """The identity, whose backward pass raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("no memory")


class Encoder(nn.Module):
    """Two layers with a buffer, and a layer that nothing uses where an engine allows that."""

    def __init__(self, engine):
        super().__init__()
        self.inner, self.fails = mlp(0), ""
        self.register_buffer("calls", torch.zeros(()))
        if engine == "finds unused":
            self.unused = nn.Linear(2, 2).double()

    def forward(self, x):
        self.calls += 1
        if self.fails == "inside":
            raise MemoryError("no memory")
        z = self.inner[1](self.inner[0](x))
        if self.fails == "backward":
            z = RaisesBackward.apply(z)
        return self.inner[2](z)


def with_engine(engine):
    plain = Encoder(engine)
    if engine == "none":
        return plain, plain
    options = {"finds unused": {"find_unused_parameters": True}, "static": {"static_graph": True}}.get(engine, {})
    return DistributedDataParallel(plain, **options), plain


def failing_body(engine, deferred):
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    true = dense_gradients(mlp(0), x, y)
    model, plain = with_engine(engine)

    def step(fails="", bad=0):
        calls = [0]

        def encode(z):
            calls[0] += 1
            failing = calls[0] == bad and rank == 1
            if failing and fails == "before":
                raise MemoryError("no memory")
            plain.fails = fails if failing else ""
            found = model(z)
            if failing and fails == "after":
                raise MemoryError("no memory")
            return found

        loss = wb.GradCache([encode, encode], 2, good_loss, deferred=deferred)(x[rows], y[rows])
        if deferred:
            loss.backward()

    def right_step():
        step()
        found = gradients_of(plain.inner)
        if engine == "none":
            for grad in found:
                dist.all_reduce(grad)
                grad /= 2  # as an engine averages
        assert_all_same(found, true)

    for bad in (2 * CHUNKS + 1, 4 * CHUNKS - 1, 4 * CHUNKS):  # the first, the last but one and the last second pass
        for fails in ("before", "inside", "after", "backward"):
            with pytest.raises(ValueError if rank == 0 else MemoryError, match="no memory"):
                step(fails, bad)
            assert all(p.grad is None for p in model.parameters()), (fails, bad)
            right_step()
    return True


@pytest.mark.parametrize("deferred", [False, True], ids=["immediate", "deferred"])
@pytest.mark.parametrize("engine", ["none", "ddp", "finds unused", "static"])
def test_all_ranks_raise_and_the_next_step_is_right(engine, deferred):
    assert run_ranks(failing_body, 2, engine, deferred, timeout_s=60) == [True, True]


class Whole(nn.Module):
    """A model whose forward pass makes a cached step, as a training step in Lightning's does inside of DDP's."""

    def __init__(self):
        super().__init__()
        self.inner, self.calls, self.bad = mlp(0), 0, 0

    def encode(self, z):
        self.calls += 1
        if self.calls == self.bad:
            raise MemoryError("no memory")
        return self.inner(z)

    def forward(self, x, y):
        return wb.GradCache([self.encode, self.encode], 2, good_loss, deferred=True)(x, y)


def enclosed_body():
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    true, model = dense_gradients(mlp(0), x, y), DistributedDataParallel(Whole())
    for bad in (2 * CHUNKS + 1, 4 * CHUNKS):
        model.module.calls, model.module.bad = 0, bad if rank == 1 else 0
        with pytest.raises(ValueError if rank == 0 else MemoryError, match="no memory"):
            model(x[rows], y[rows]).backward()
        assert all(p.grad is None for p in model.parameters())
        model(x[rows], y[rows]).backward()
        assert_all_same(gradients_of(model), true)
    return True


def test_all_ranks_raise_inside_of_the_forward_pass_of_an_engine():
    assert run_ranks(enclosed_body, 2, timeout_s=60) == [True, True]
