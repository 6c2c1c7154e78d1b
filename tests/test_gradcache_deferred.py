"""A loss whose backward pass, whoever calls it, makes the second passes: deferred = immediate = uncached.

The truth is one process with all rows and the same chunks, whose graphs are all kept: masks of dropout and statistics
of BatchNorm are those of a chunk.
"""

import copy
import gc
import threading
import weakref
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from gradcache_models import OUT, Clip, D, TwoParts, assert_all_same, batch, good_loss, gradients_of, mlp, sharded
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import wholebatch as wb
from wholebatch.gradcache.step import Step
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


def assert_close(got, expected, factor=1.0):
    largest = max(z.abs().max().item() for z in expected if z is not None)
    for z, true in zip(got, expected, strict=True):
        assert (z is None) == (true is None)
        if true is not None:
            assert_same(z, factor * true, relative=1e-10, absolute=1e-13 * factor * largest)


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
        assert_close(gradients_of(*distinct(plain), loss_fn), true, factor)
        for buckets in reduced:
            assert buckets == [0], (name, buckets)
            buckets.clear()


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("kind", MODELS)
def test_deferred_immediate_and_uncached_steps_are_one_gradient(kind, counts):
    run_ranks(forms_body, len(counts), kind, counts, timeout_s=120)


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
        assert_close([z.clone() for z in found], true)
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
    local, plain, loss_fn = (x[rows], y[rows]), mlp(0), Clip()
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
        assert_close(gradients_of(plain), true, factor)
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
    assert loss_fn is not None


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
            assert_close(gradients_of(plain), true)
            assert reduced == [0], mode
            reduced.clear()
        for k in range(4):
            with nullcontext() if k == 3 else model.no_sync():
                (model(x[rows], y[rows]) / 4).backward()
        assert_close(gradients_of(plain), true)
        assert reduced == [0], mode
        reduced.clear()
    plain.mode, model.manual = "engine", None
    model(x[rows], y[rows]).backward()
    assert_close(gradients_of(plain), true)
    assert reduced == [0]
    for prepare in (True, False):  # Lightning's manual_backward prepares the engine; loss.backward() does not
        reduced.clear()
        model.manual = partial(manual_backward, model, prepare)
        with model.no_sync():  # for the outer forward pass, whose output is no loss
            model.require_backward_grad_sync = True
            model(x[rows], y[rows])
        assert_close(gradients_of(plain), true)
        assert reduced == [0], prepare
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
    assert_close([p.grad.full_tensor() for p in model.parameters()], true)


@pytest.mark.parametrize("parts", [True, False])
def test_an_encoder_inside_the_forward_pass_of_fsdp(parts):
    run_ranks(inside_fsdp_body, 2, parts, timeout_s=60)


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
            assert_close([p.grad.clone() for p in model.parameters()], true, factor)
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
            assert_close([p.grad.clone() for p in model.parameters()], true)
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


class CountingScaler(torch.amp.GradScaler):
    """A scaler whose skipped steps can be counted."""


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


def test_another_thread_may_go_backward():
    """As on CUDA, where autograd runs nodes in a thread of the device."""
    model, (x, y) = mlp(0, nn.Dropout(0.3)), batch(8)
    torch.manual_seed(1)
    wb.GradCache([model, model], 3, good_loss)(x, y)
    true = gradients_of(model)
    torch.manual_seed(1)
    loss = wb.GradCache([model, model], 3, good_loss, deferred=True)(x, y)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert_all_same(gradients_of(model), true)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_the_loss_is_only_evaluated(context):
    calls, inner, (x, y) = [0], mlp(0, nn.Dropout(0.3)).eval(), batch(7)

    def model(z):
        calls[0] += 1
        return inner(z)

    expected = good_loss(inner(x), inner(y))
    with context():
        loss = wb.GradCache([model, model], 3, good_loss, deferred=True)(x, y)
        r = wb.gradcache.encode(model, x, 3)
    assert_same(loss, expected, relative=1e-12)
    assert torch.equal(r, inner(x)) or (r - inner(x)).abs().max() < 1e-14
    assert not loss.requires_grad
    assert not r.requires_grad
    assert calls == [9], "one pass a chunk"
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()
    assert all(p.grad is None for p in inner.parameters())


def test_a_backward_pass_that_never_comes_leaves_nothing():
    """The graph alone holds a step; nothing waits for the garbage collector."""
    model, (x, y) = mlp(0, nn.BatchNorm1d(8)), batch(8)
    cache = wb.GradCache([model, model], 4, good_loss, deferred=True, keep_graphs=0.5)
    cache(x, y).backward()
    gc.unfreeze()  # objects that something has frozen are not listed
    gc.disable()
    try:
        # A caught error of an earlier test may hold its step until the next collection.
        earlier = [one for one in gc.get_objects() if type(one) is Step]
        inputs = [x.clone(), y.clone()]
        for _ in range(3):
            loss = cache(*inputs)
            r = wb.gradcache.encode(model, inputs[0], 4)
            steps = [
                weakref.ref(one)
                for one in gc.get_objects()
                if type(one) is Step and not any(one is another for another in earlier)
            ]
            assert len(steps) >= 2
            del loss, r
            assert not any(one() for one in steps)
        held = [weakref.ref(z) for z in inputs]
        inputs.clear()
        assert not any(z() is not None for z in held)
    finally:
        gc.enable()


def test_after_its_backward_pass_a_loss_holds_no_inputs():
    model = mlp(0)
    x, y = (z.clone() for z in batch(8))
    loss = wb.GradCache([model, model], 4, good_loss, deferred=True)(x, y)
    loss.backward(retain_graph=True)
    held = [weakref.ref(x), weakref.ref(y)]
    del x, y
    assert not any(z() is not None for z in held)
    assert loss.grad_fn is not None


def change_by_optimizer(model):
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def change_in_place(model):
    with torch.no_grad():
        model[2].bias.add_(1)


MISTAKES = {
    "an optimizer's step in between": (
        lambda model, loss: (change_by_optimizer(model), loss.backward())[0],
        r"a parameter of model 0 .*, of shape \(1,\), has been changed since the forward pass",
    ),
    "a changed parameter": (
        lambda model, loss: (change_in_place(model), loss.backward())[0],
        r"a parameter of model 0 .*, of shape \(4,\), has been changed since the forward pass",
    ),
    "create_graph": (
        lambda model, loss: loss.backward(create_graph=True),
        "cannot be differentiated again: leave out create_graph=True",
    ),
    "inputs": (
        lambda model, loss: loss.backward(inputs=[model.scale]),
        r"torch\.autograd\.grad or backward\(inputs=\.\.\.\) ask for it elsewhere: call loss\.backward\(\)",
    ),
}


class WithScale(nn.Sequential):
    def __init__(self):
        super().__init__(*mlp(0))
        self.scale = nn.Parameter(torch.tensor([1.5], dtype=torch.float64))

    def forward(self, x):
        for layer in [self[0], self[1], self[2]]:
            x = layer(x)
        return x


def mistakes_body():
    """A mistake of the last rank raises on all ranks, gradients are as they were, and the next step is right."""
    last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    x, y = batch(6)
    for name, (mistake, message) in MISTAKES.items():
        for accumulated in (False, True):
            if name == "an optimizer's step in between" and not accumulated:
                continue  # it would have no gradients to make a step with
            model = WithScale()
            cache = wb.GradCache([model, model], SIZE, partial(scaled_loss, model), deferred=True)
            for p in model.parameters():
                p.grad = torch.ones_like(p) if accumulated else None
            loss, before = cache(x, y), copy.deepcopy(model.state_dict())
            with pytest.raises(ValueError, match=message):
                (mistake if last else right)(model, loss)
            for p in model.parameters():
                assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None, name
            model.load_state_dict(before)
            cache(x, y).backward()


def right(_model, loss):
    loss.backward()


def scaled_loss(model, a, b):
    return good_loss(a, b) * model.scale.sum()


def twice_body():
    model, (x, y) = WithScale(), batch(6)
    loss = wb.GradCache([model, model], SIZE, partial(scaled_loss, model), deferred=True)(x, y)
    loss.backward(retain_graph=True)
    grads = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="has had its backward pass, and its gradient is counted"):
        loss.backward()
    assert all(torch.equal(p.grad, z) for p, z in zip(model.parameters(), grads, strict=True))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_backward_pass_raises_on_all_ranks(world_size):
    run_ranks(twice_body, world_size, timeout_s=60)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_backward_pass_raises_on_all_ranks(world_size):
    run_ranks(mistakes_body, world_size, timeout_s=60)


def test_a_representation_that_the_loss_changes_raises():
    model, (x, y) = mlp(0), batch(6)
    with pytest.raises(ValueError, match=r"representation 0 of model 0 .* was changed in place .* change a copy"):
        wb.GradCache([model, model], SIZE, lambda a, b: good_loss(a.mul_(2), b), deferred=True)(x, y).backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("accumulated", [False, True])
def test_a_model_with_a_hidden_state_raises_in_the_backward_pass(accumulated):
    inner, calls, (x, y) = mlp(0), [0], batch(6)

    def encode(z):
        calls[0] += 1
        return inner(z) * (1 if calls[0] < 4 else 1.01)

    for p in inner.parameters():
        p.grad = torch.ones_like(p) if accumulated else None
    loss = wb.GradCache([encode, inner], 3, good_loss, deferred=True)(x, y)
    with pytest.raises(RuntimeError, match="gave another representation 0 than the first"):
        loss.backward()
    for p in inner.parameters():
        assert torch.equal(p.grad, torch.ones_like(p)) if accumulated else p.grad is None


def test_buffers_that_another_pass_has_moved_are_as_in_the_first_pass_and_stay_moved():
    """Between the passes of two losses, the running averages go on; the second passes see the first values."""
    model, (x, y) = mlp(0), batch(8)
    nn.utils.parametrizations.spectral_norm(model[0])  # whose output depends on its buffers
    plain = copy.deepcopy(model)
    losses = [good_loss(*(torch.cat([plain(part) for part in z.split(4)]) for z in pair)) for pair in ((x, y), (y, x))]
    (losses[0] + losses[1]).backward()
    true = gradients_of(plain)
    cache = wb.GradCache([model, model], 4, good_loss, deferred=True)
    first, second = cache(x, y), cache(y, x)
    (first + second).backward()
    assert_all_same(gradients_of(model), true)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


def test_one_number_for_the_whole_batch_and_several_representations():
    model, (x, y) = TwoParts(), batch(7)

    def loss_of(a, b):
        return good_loss(a[0], b[0]) * a[2].exp() + (a[1] - b[1]).square().mean()

    loss_of(model(x), model(y)).backward()
    true = gradients_of(model)
    loss_of(wb.gradcache.encode(model, x, 3), wb.gradcache.encode(model, y, 2)).backward()
    assert_all_same(gradients_of(model), true)


def frozen_body():
    """A frozen encoder is encoded without a graph; one that is frozen on one rank alone raises on all."""
    frozen, model, (x, y) = mlp(0).requires_grad_(False), mlp(1), batch(6)
    good_loss(frozen(x), model(y)).backward()
    true = gradients_of(model)
    r = wb.gradcache.encode(frozen, x, 2)
    assert not r.requires_grad
    good_loss(r, wb.gradcache.encode(model, y, 2)).backward()
    assert_all_same(gradients_of(model), true)
    if dist.is_initialized() and dist.get_world_size() > 1:
        with pytest.raises(ValueError, match="the same representations must have a gradient on all ranks"):
            wb.gradcache.encode(model.requires_grad_(dist.get_rank() == 0), y, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_frozen_encoder_has_no_graph(world_size):
    run_ranks(frozen_body, world_size, timeout_s=60)


def test_a_checkpoint_around_the_loss():
    """A checkpoint calls the loss again in the backward pass, which needs no second graph of the encoders."""
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(8)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    a, b = (wb.gradcache.encode(model, z, 3) for z in (x, y))
    checkpoint(loss_fn, a, b, use_reentrant=False).backward()
    assert_all_same(gradients_of(model, loss_fn), true)


def test_compiled_encoders():
    model, loss_fn, (x, y) = mlp(0), Clip(), batch(8)
    loss_fn(model(x), model(y)).backward()
    true = gradients_of(model, loss_fn)
    compiled = torch.compile(model, backend="eager")
    (wb.GradCache([compiled, compiled], 4, loss_fn, deferred=True)(x, y) * 2).backward()
    assert_close(gradients_of(model, loss_fn), true, 2.0)


def grad_mode_body():
    model, (x, y) = mlp(0), batch(4)
    cache = wb.GradCache([model, model], 2, good_loss, deferred=True)
    with (
        torch.set_grad_enabled(dist.get_rank() == 0),
        pytest.raises(ValueError, match=r"is_grad_enabled\(\) must be the same on all ranks, got \[True, False\]"),
    ):
        cache(x, y)
    cache(x, y).backward()
    return model[0].weight.grad.norm().item()


def test_ranks_evaluate_together():
    assert len({*run_ranks(grad_mode_body, 2)}) == 2 - 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deferred": 1}, "deferred must be True or False, got 1"),
        ({"deferred": True, "scaler": torch.amp.GradScaler("cpu")}, "scaler must be None with deferred=True"),
    ],
)
def test_wrong_settings(arguments, message):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=message):
        wb.GradCache([model, model], 2, good_loss, **arguments)


def encode_mistakes_body():
    model, (x, _) = mlp(0), batch(6)
    last = dist.get_rank() == dist.get_world_size() - 1
    for arguments, message, kind in (
        ((model, x, 0), "chunk_sizes must be a positive integer", ValueError),
        ((model, "text", 2), "takes a split_input_fn", ValueError),
        ((None, x, 2), "models must be a list of modules or functions", ValueError),
        ((model, x), "missing a required argument: 'chunk_size'", TypeError),
    ):
        with pytest.raises(kind, match=message):
            wb.gradcache.encode(*(arguments if last else (model, x, 2)))
    wb.gradcache.encode(model, x, 2).sum().backward()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wrong_call_of_encode_raises_on_all_ranks(world_size):
    run_ranks(encode_mistakes_body, world_size, timeout_s=60)
