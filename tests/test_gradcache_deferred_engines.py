"""Deferred losses under engines: one synchronization for each backward pass, whatever else is in it."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp import counting
from gradcache_models import (
    OUT,
    assert_all_times,
    batch,
    good_loss,
    gradients_of,
    mlp,
    sharded,
)
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

COUNTS = [(6,), (5, 2), (4, 0, 3)]
SIZE = 2


class Roles(nn.Module):
    """One encoder for queries, keys and several hard negatives, with a scale."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(0), wb.Scale(7.0).double()

    def forward(self, x):
        return normalize(self.net(x), dim=-1), self.scale()


def roles_loss(queries, keys, negatives):
    return wb.functional.info_nce_loss(
        queries[0], keys[0], hard_negatives=negatives[0].unflatten(0, (-1, 2)), logit_scale=queries[1]
    )


def roles_body(counts, engine):
    """An encoder that is called three times in a step, the scale from one of the calls; hard negatives; two losses."""
    rank, total = dist.get_rank(), sum(counts)
    rows = Partition(counts).rows(rank)
    (x, y), (n, _) = batch(total), batch(2 * total, seed=1)
    pairs = slice(2 * rows.start, 2 * rows.stop)
    dense = Roles()
    q, k, negatives = dense(x), dense(y), dense(n)
    first = wb.reference.info_nce_loss(q[0], k[0], hard_negatives=negatives[0].unflatten(0, (-1, 2)), logit_scale=q[1])
    second = wb.reference.clip_loss(dense(y)[0], dense(x)[0], 3.0)
    (first + 0.25 * second).backward()
    true = gradients_of(dense)
    plain = Roles()
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain)
    reduced = counting(model) if engine == "ddp" else []
    one = wb.GradCache([model] * 3, [2, 3, 4], roles_loss, deferred=True)
    two = wb.GradCache([model] * 2, 2, lambda a, b: wb.functional.clip_loss(a[0], b[0], 3.0), deferred=True)
    for form in ("two caches", "encode"):
        if form == "two caches":
            loss = one(x[rows], y[rows], n[pairs]) + 0.25 * two(y[rows], x[rows])
        else:
            q, k, negatives = (
                wb.gradcache.encode(model, z, size) for z, size in ((x[rows], 2), (y[rows], 3), (n[pairs], 4))
            )
            loss = roles_loss(q, k, negatives) + 0.25 * wb.functional.clip_loss(k[0], q[0], 3.0)
        loss.backward()
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        assert_all_times([z.clone() for z in found], true)
        assert reduced in ([], [0]), form
        reduced.clear()
        model.zero_grad()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_encoder_with_several_roles_and_two_losses(engine, counts):
    run_ranks(roles_body, len(counts), counts, engine, timeout_s=60)


def several_body(counts, options):
    """Several forward passes before one backward pass, beside a loss without caching, and accumulation."""
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    local, plain = (x[rows], y[rows]), mlp(0)
    dense = copy.deepcopy(plain)
    wb.reference.clip_loss(dense(x), dense(y), 1.0).backward()
    true = gradients_of(dense)
    model = DistributedDataParallel(plain, **options)
    reduced = counting(model)
    cache = wb.GradCache([model, model], SIZE, good_loss, deferred=True)

    def uncached():
        a, b = model(torch.cat(local)).tensor_split(2)
        return good_loss(a, b)

    def check(factor, buckets):
        assert_all_times(gradients_of(plain), true, factor)
        assert reduced == [0] * buckets
        reduced.clear()

    (uncached()).backward()
    check(1.0, 1)
    for _ in range(3):  # static graphs count gradients in the first two
        losses = [cache(*local) for _ in range(3)]
        (losses[2] + 2 * losses[0] + 3 * losses[1]).backward()
        check(6.0, 1)
    for order in (lambda: (cache(*local), uncached()), lambda: (uncached(), cache(*local))):
        a, b = order()
        (a + b).backward()
        check(2.0, 2)  # an engine reduces what was called without caching by itself
        b, a = order()
        (a + b).backward()
        check(2.0, 2)
    for inside in (True, False):  # DDP reads its switch in the forward pass, wherever the backward pass is
        for k in range(4):
            held = nullcontext() if k == 3 else model.no_sync()
            with held:
                loss = cache(*local) / 4
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
        check(1.0, 1)
    loss = cache(*local)
    with model.no_sync():
        loss.backward()
    check(1.0, 1)


OPTIONS = {
    "ddp": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
}


@pytest.mark.parametrize("counts", [(5,), (5, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_one_synchronization_for_each_backward_pass(options, counts):
    run_ranks(several_body, len(counts), counts, OPTIONS[options], timeout_s=60)


def hidden_passes_body():
    """Without hiding held passes from a static graph, its later steps would wait for gradients that never come."""
    from wholebatch.gradcache.engines.ddp import DDP

    model = DistributedDataParallel(mlp(0), static_graph=True)
    reduced, (x, y) = counting(model), batch(6)
    for step in range(3):
        for at in range(3):
            with nullcontext() if at == 2 else DDP.hold(model):
                (model(x[2 * at : 2 * at + 2]) - y[0, :OUT]).square().sum().backward()
        if step == 1:
            return [*reduced]
        reduced.clear()
    return None


def test_a_static_graph_counts_passes_that_are_not_hidden():
    assert run_ranks(hidden_passes_body, 1) == [[]], "the second step reduced nothing"


class InsideTheEngine(nn.Module):
    """As a LightningModule: the engine's forward pass is a training step, which reaches the encoders directly."""

    def __init__(self):
        super().__init__()
        self.image, self.text, self.log_scale = mlp(0), mlp(1), nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
        self.mode = "uncached"

    def loss(self, a, b):
        return wb.functional.clip_loss(normalize(a, dim=1), normalize(b, dim=1), self.log_scale.exp().sum())

    def forward(self, x, y, inner=False):
        if self.mode == "cache":
            return wb.GradCache([self.image, self.text], SIZE, self.loss, deferred=True)(x, y)
        if inner:
            return self.image(x), self.text(y)
        if self.mode == "engine":  # as self.trainer.strategy.model, which is called once more
            engine = DistributedDataParallel._active_ddp_module
            loss = self.loss(*wb.gradcache.encode(engine, ([x, y], {"inner": True}), SIZE))
            if engine.manual:
                engine.manual(loss)
            return loss
        a = self.image(x) if self.mode == "uncached" else wb.gradcache.encode(self.image, x, SIZE)
        b = wb.gradcache.encode(self.text, y, 3) if self.mode == "encode" else self.text(y)
        return self.loss(a + self.image(x) if self.mode == "mixed" else a, b)


def manual_backward(model, prepare, loss):
    if prepare:
        model.require_forward_param_sync = True
        model.reducer._rebuild_buckets()
        model.reducer.prepare_for_backward([])
    loss.backward()
    model.require_backward_grad_sync = False  # as Lightning does, for the end of the outer forward pass


def engine_inside_its_own_step(model, plain, x, y, true, reduced):
    plain.mode, model.manual = "engine", None
    model(x, y).backward()
    assert_all_times(gradients_of(plain), true)
    assert reduced == [0]
    for prepare in (True, False):  # Lightning's manual_backward prepares the engine; loss.backward() does not
        reduced.clear()
        model.manual = partial(manual_backward, model, prepare)
        with model.no_sync():  # for the outer forward pass, whose output is no loss
            model.require_backward_grad_sync = True
            model(x, y)
        assert_all_times(gradients_of(plain), true)
        assert reduced == [0], prepare


def inside_body(counts, options):
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    plain, dense = InsideTheEngine(), InsideTheEngine()
    dense_loss = wb.reference.clip_loss(
        normalize(dense.image(x), dim=1), normalize(dense.text(y), dim=1), dense.log_scale.exp().sum()
    )
    dense_loss.backward()
    true, model = gradients_of(dense), DistributedDataParallel(plain, **options)
    reduced = counting(model)
    for mode in ("uncached", "cache", "encode", "half"):
        plain.mode = mode
        for _ in range(2):
            model(x[rows], y[rows]).backward()
            assert_all_times(gradients_of(plain), true)
            assert reduced == [0], mode
            reduced.clear()
        for k in range(4):
            with nullcontext() if k == 3 else model.no_sync():
                (model(x[rows], y[rows]) / 4).backward()
        assert_all_times(gradients_of(plain), true)
        assert reduced == [0], mode
        reduced.clear()
    if torch.__version__ >= (2, 13):  # earlier DDP refuses a second forward pass before its first one's reduction
        engine_inside_its_own_step(model, plain, x[rows], y[rows], true, reduced)
    plain.mode = "mixed"
    with pytest.raises(ValueError, match="is called with and without gradient caching inside one forward pass"):
        model(x[rows], y[rows]).backward()


@pytest.mark.parametrize("counts", [(5,), (5, 2), (3, 0, 4)], ids=str)
@pytest.mark.parametrize("options", ["ddp", "views"])
def test_an_encoder_inside_the_engines_forward_pass(options, counts):
    run_ranks(inside_body, len(counts), counts, OPTIONS[options], timeout_s=60)


def refused_inside_body(options, name):
    plain, (x, y) = InsideTheEngine(), batch(4)
    model, plain.mode = DistributedDataParallel(plain, **options), "encode"
    with pytest.raises(ValueError, match=f"with {name}=True, which looks for its parameters") as error:
        model(x, y)
    assert "wb.GradCache([self.trainer.strategy.model], ...)" in str(error.value), "the form to use"
    with pytest.raises(ValueError, match="must reach its parameters through the DistributedDataParallel"):
        wb.GradCache([plain.image, plain.text], SIZE, good_loss, deferred=True)(x, y)  # outside of its forward pass


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_engines_that_look_for_parameters_in_their_output_are_refused(name):
    run_ranks(refused_inside_body, 2, {name: True}, name, timeout_s=60)


def inside_fsdp_body(parts):
    """A larger unit of FSDP has whole parameters only during its own passes; a unit of its own works."""
    plain, (x, y) = InsideTheEngine(), batch(6)
    dense = copy.deepcopy(plain)
    dense(x, y).backward()
    true = gradients_of(dense)
    rows = Partition((4, 2)).rows(dist.get_rank())
    model, plain.mode = sharded(plain, *([plain.image, plain.text] if parts else [])), "encode"
    if not parts:
        with pytest.raises(ValueError, match="must reach its parameters through the FSDP module that shards them"):
            model(x[rows], y[rows])
        return
    model(x[rows], y[rows]).sum().backward()
    assert_all_times([p.grad.full_tensor() for p in model.parameters()], true)


@pytest.mark.parametrize("parts", [True, False])
def test_an_encoder_inside_the_forward_pass_of_fsdp(parts):
    run_ranks(inside_fsdp_body, 2, parts, timeout_s=60)


class Drifting(nn.Module):
    """Another output in one of its calls."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.calls, self.drifts = inner, 0, call

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1.5 if self.calls == self.drifts else 1.0)


def fsdp_error_body(hidden, deferred):
    """After a pass the outermost FSDP module holds whole parameters; the gradients of its shards are restored."""
    from torch.distributed.fsdp import fully_shard

    x, y = batch(4)
    inner = fully_shard(mlp(0))
    shards, module = [*inner.parameters()], Drifting(inner, 6)
    for accumulated in (False, True):
        if accumulated:
            wb.GradCache([inner, inner], SIZE, good_loss)(x, y)
        before = [None if p.grad is None else p.grad.full_tensor().clone() for p in shards]
        module.calls = 0
        model = (lambda z: 1 * module(z)) if hidden else module
        cache = wb.GradCache([model, model], SIZE, good_loss, deferred=deferred)
        with pytest.raises(RuntimeError, match="gave another representation"):
            cache(x, y).backward()
        for p, grad in zip(shards, before, strict=True):
            assert p.grad is None if grad is None else torch.equal(p.grad.full_tensor(), grad)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_an_error_under_fsdp_restores_the_gradients_of_shards(hidden, deferred):
    run_ranks(fsdp_error_body, 2, hidden, deferred, timeout_s=60)


def step_between_body(engine):
    """The outermost module of FSDP2 holds whole parameters after a pass, and an optimizer changes its shards."""
    from torch.distributed.fsdp import fully_shard

    x, y = batch(4)
    model = DistributedDataParallel(mlp(0)) if engine == "ddp" else fully_shard(mlp(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9)
    cache = wb.GradCache([model, model], SIZE, good_loss, deferred=True)
    cache(x, y).backward()
    loss = cache(x, y)
    optimizer.step()
    with pytest.raises(ValueError, match="been changed since the forward pass of this loss"):
        loss.backward()


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_an_optimizers_step_in_between_is_refused(engine):
    run_ranks(step_between_body, 2, engine, timeout_s=60)


class RawScale(nn.Module):
    """An encoder that returns a parameter as it is."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(0), nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    def forward(self, x):
        return normalize(self.net(x), dim=-1), self.scale


def raw_scale_body(static_graph):
    rows = Partition((5, 2)).rows(dist.get_rank())
    x, y = batch(7)
    dense, plain = RawScale(), RawScale()
    wb.reference.clip_loss(dense(x)[0], dense(y)[0], dense.scale).backward()
    true = gradients_of(dense)
    model = DistributedDataParallel(plain, static_graph=static_graph)
    for _ in range(3):
        a, b = (wb.gradcache.encode(model, z[rows], SIZE) for z in (x, y))
        wb.functional.clip_loss(a[0], b[0], a[1]).backward()
        assert_all_times(gradients_of(plain), true)


@pytest.mark.parametrize("static_graph", [False, True])
def test_a_parameter_that_is_a_representation(static_graph):
    """In a pass that is hidden from the engine, the graph of such a parameter is itself."""
    run_ranks(raw_scale_body, 2, static_graph, timeout_s=60)


def hook_body():
    """A hook of each accumulated gradient would run in every chunk's pass."""
    plain, (x, y) = mlp(0), batch(4)
    model = DistributedDataParallel(plain)
    plain[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-0.1, 0.1))
    with pytest.raises(ValueError, match="has a hook for when its gradient is accumulated"):
        wb.GradCache([model, model], SIZE, good_loss, deferred=True)(x, y)


def test_a_hook_of_accumulated_gradients_is_refused():
    run_ranks(hook_body, 2, timeout_s=60)


def fsdp1(module, parts):
    """Shard a module, and if `parts`, its first linear layer by itself.

    Every rank has entries of each unit: without, summon_full_params(with_grads=True) fails, also without caching.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import CustomPolicy

    first = next(inner for inner in module.modules() if isinstance(inner, nn.Linear))
    policy = CustomPolicy(lambda inner: inner is first) if parts else None
    return FullyShardedDataParallel(
        module, use_orig_params=True, device_id=torch.device("cpu"), auto_wrap_policy=policy
    )


def fsdp1_body(counts, parts):
    from torch.distributed.fsdp import FullyShardedDataParallel

    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    dense, plain = Roles(), Roles()
    wb.reference.clip_loss(dense(x)[0], dense(y)[0], dense.scale()).backward()
    true = gradients_of(dense)
    model = fsdp1(plain, parts)

    def check(factor=1.0):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert_all_times([p.grad.clone() for p in model.parameters()], true, factor)
        model.zero_grad()

    def loss_fn(a, b):
        return wb.functional.clip_loss(a[0], b[0], a[1])

    for deferred in (False, True):
        cache = wb.GradCache([model, model], SIZE, loss_fn, deferred=deferred)
        for _ in range(2):
            loss = cache(x[rows], y[rows])
            if deferred:
                (3.7 * loss).backward()
            check(3.7 if deferred else 1.0)
    for k in range(4):
        with nullcontext() if k == 3 else model.no_sync():
            (cache(x[rows], y[rows]) / 4).backward()
    check()


@pytest.mark.parametrize(("counts", "parts"), [((5, 2), False), ((3, 0, 4), False), ((5, 2), True)], ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_under_the_first_fsdp(counts, parts):
    run_ranks(fsdp1_body, len(counts), counts, parts, timeout_s=60)


class OneStep(nn.Module):
    """As a LightningModule: the next forward pass is a step, which calls the engine of this module once more."""

    def __init__(self):
        super().__init__()
        self.net, self.step = Roles(), None

    def forward(self, *given):
        step, self.step = self.step, None
        return self.net(*given) if step is None else step(*given)


def inside_fsdp1_body(manual, micro_steps, synchronizes, parts):
    from torch.distributed.fsdp import FullyShardedDataParallel

    counts = (5, 2)
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    dense = Roles()
    wb.reference.clip_loss(dense(x)[0], dense(y)[0], dense.scale()).backward()
    true = gradients_of(dense)
    model = fsdp1(OneStep(), parts)

    def step(x, y):
        a, b = (wb.gradcache.encode(model, given, SIZE) for given in (x, y))
        loss = wb.functional.clip_loss(a[0], b[0], a[1]) / micro_steps
        if manual:
            loss.backward()
        return loss

    for _ in range(2):
        for k in range(micro_steps):
            with nullcontext() if synchronizes or k == micro_steps - 1 else model.no_sync():
                model.module.step = step
                loss = model(x[rows], y[rows])
                if not manual:
                    loss.backward()
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            assert_all_times([p.grad.clone() for p in model.parameters()], true)
        model.zero_grad()


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("micro_steps", "synchronizes"), [(1, True), (3, True), (3, False)])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_inside_the_forward_pass_of_the_first_fsdp(micro_steps, synchronizes, manual, parts):
    run_ranks(inside_fsdp1_body, 2, manual, micro_steps, synchronizes, parts, timeout_s=60)


def inner_unit_of_fsdp1_body():
    model = fsdp1(OneStep(), parts=True)
    model.module.step = lambda x: wb.gradcache.encode(model.module.net.net[0], x, SIZE)
    message = r"must be its outermost module, .* \(in Lightning self.trainer.strategy.model\)"
    with pytest.raises(ValueError, match=message):
        model(batch(4)[0])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_inner_unit_of_the_first_fsdp_is_refused():
    run_ranks(inner_unit_of_fsdp1_body, 2, timeout_s=60)
