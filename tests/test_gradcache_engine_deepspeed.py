"""Gradient caching under DeepSpeed raises where it would be wrong, and restores gradients.

The engine here has the name of DeepSpeed's, and no more than the attributes that wholebatch reads. `make ecosystem`
runs DeepSpeed itself.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from gradcache_models import assert_all_same, batch, good_loss, gradients_of, mlp
from torch import nn

import wholebatch as wb


class Optimizer:
    """ZeRO 1, 2 or 3 of one process: hooks hand each gradient over once, the sum of micro-steps stays in `received`."""

    def __init__(self, module, switch):
        self.bit16_groups = self.fp16_groups = [list(module.parameters())]
        self.received = {}
        self.hooks_run = 0
        self._backward_seen_this_step = False
        if switch:
            self._coalesce_grad_reduction = False

    def needs_scaler(self):
        return False

    def get_gradient_for_reduction(self, p):
        return p.grad

    def process_gradients(self, p, _group=0):
        if getattr(self, "_coalesce_grad_reduction", False):
            return
        self.hooks_run += 1
        self.received[p] = self.received.get(p, 0) + p.grad
        p.grad = None

    reduce_ready_partitions_and_remove_grads = process_gradients


class DeepSpeedEngine(nn.Module):
    def __init__(self, module, stage, switch=True):
        super().__init__()
        self.module, self.stage = module, stage
        self.optimizer = Optimizer(module, switch) if stage else None
        self.ends = self.global_steps = 0
        self._running_engine_backward = self._manual_backward_expected = self.inside_no_sync_ctxt = False
        self._scale_wrt_gas = True
        if stage:
            for p in module.parameters():
                p.register_post_accumulate_grad_hook(self.optimizer.process_gradients)

    def forward(self, x):
        return self.module(x)

    def zero_optimization_stage(self):
        return self.stage

    def _backward_prologue(self):
        pass

    def _backward_epilogue(self):
        self.ends += 1

    def backward(self, loss):
        self._running_engine_backward = True
        try:
            self._backward_prologue()
            loss.backward()
            self._backward_epilogue()
        finally:
            self._running_engine_backward = False


@pytest.fixture
def engine_of(monkeypatch):
    """Return a function that returns the engine of a module, of a class in a module named deepspeed."""
    deepspeed = ModuleType("deepspeed")
    deepspeed.__version__ = "0.19.0"
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(DeepSpeedEngine, "__module__", "deepspeed")
    return DeepSpeedEngine


def step(engine, deferred, x, y):
    """Make a cached step in one of both forms."""
    cache = wb.GradCache([engine, engine], 3, good_loss, deferred=deferred)
    if deferred:
        engine.backward(cache(x, y))
    else:
        cache(x, y)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_all_passes_are_one_backward_pass_of_the_engine(engine_of, stage, deferred):
    model, true, (x, y) = mlp(0), mlp(0), batch(8)
    engine = engine_of(model, stage)
    step(engine, deferred, x, y)
    good_loss(true(x), true(y)).backward()
    found = [engine.optimizer.received[p] for p in model.parameters()] if stage else gradients_of(model)
    assert_all_same(found, gradients_of(true))
    assert engine.ends == 1
    assert not stage or engine.optimizer.hooks_run == len(list(model.parameters()))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("settings", "switch", "message"),
    [
        ({"pipeline_parallelism": True}, True, "a pipeline of DeepSpeed, which makes its passes itself"),
        ({"zenflow": True}, True, "zenflow of DeepSpeed must be off"),
        ({}, False, r"ZeRO 2 .* Optimizer of version 0\.19\.0: use DeepSpeed >= 0\.19\.1"),
    ],
)
def test_an_engine_that_cannot_coalesce_raises_before_any_gradient_changes(
    engine_of, settings, switch, message, deferred
):
    model, (x, y) = mlp(0), batch(8)
    engine = engine_of(model, 2, switch)
    vars(engine).update(settings)
    with pytest.raises(ValueError, match=message):
        step(engine, deferred, x, y)
    assert all(p.grad is None for p in model.parameters())
    assert not engine.optimizer.received
    assert engine.ends == 0


class Failing(nn.Module):
    """Raises in one of its calls."""

    def __init__(self, call):
        super().__init__()
        self.inner, self.calls, self.fails = mlp(0), 0, call

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fails:
            raise RuntimeError("no memory")
        return self.inner(x)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_second_pass_that_fails_leaves_gradients_and_engine_as_they_were(engine_of, stage, deferred):
    model, (x, y) = Failing(call=6 + 3), batch(8)  # 2 inputs of 3 chunks; the third one of the second pass
    engine = engine_of(model, stage)
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full_like(p, number)
        p.grad_accum = torch.full_like(p, -number)
    before = [dict(vars(x)) for x in (engine, engine.optimizer) if x is not None]
    with pytest.raises(RuntimeError, match="no memory"):
        step(engine, deferred, x, y)
    for number, p in enumerate(model.parameters()):
        assert torch.equal(p.grad, torch.full_like(p, number))
        assert torch.equal(p.grad_accum, torch.full_like(p, -number))
    assert [vars(x) for x in (engine, engine.optimizer) if x is not None] == before


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_call_without_caching_in_the_same_backward_pass_raises(engine_of, stage):
    model, (x, y) = mlp(0), batch(8)
    engine = engine_of(model, stage)
    engine.optimizer._backward_seen_this_step = True  # as the hook of an output leaves it
    with pytest.raises(ValueError, match="with and without gradient caching in one backward pass"):
        step(engine, True, x, y)
    assert not engine.optimizer.received


@pytest.mark.parametrize("stage", [0, 2])
def test_an_engine_that_scales_the_loss_must_do_so(engine_of, stage):
    model, (x, y) = mlp(0), batch(8)
    engine = engine_of(model, stage)
    if stage:
        engine.optimizer.needs_scaler = lambda: True
    else:
        engine.torch_autocast_z0_gradscaler = SimpleNamespace()
    with pytest.raises(ValueError, match="must be given as scaler=engine"):
        step(engine, False, x, y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_of_the_engine_in_between_is_refused(engine_of, stage):
    """Its optimizer writes parameters by `.data`, so their versions stay."""
    (x, y), engine = batch(8), engine_of(mlp(0), stage)
    loss = wb.GradCache([engine, engine], 3, good_loss, deferred=True)(x, y)
    engine.global_steps += 1
    with pytest.raises(ValueError, match="been changed since the forward pass of this loss"):
        engine.backward(loss)
    assert all(p.grad is None for p in engine.module.parameters())
