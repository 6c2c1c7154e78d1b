"""Gradient caching under DDP and FSDP2: one synchronization a step, and the gradient of the whole batch."""

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from compare import assert_same
from ddp import counting
from gradcache_models import (
    OUT,
    Clip,
    LateMaximum,
    TwoParts,
    assert_all_same,
    batch,
    dense_gradients,
    good_loss,
    gradients_of,
    gradients_of_kept,
    mlp,
    reductions,
    sharded,
)
from torch import nn
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.engines.known import synchronized
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


class Joint(nn.Module):
    """Both towers and the scale in one module, as open_clip has them."""

    def __init__(self):
        super().__init__()
        self.image, self.text = mlp(0), mlp(1, nn.BatchNorm1d(8))
        self.log_scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x, y):
        return self.image(x), self.text(y), self.log_scale.exp()


def joint_loss(parts):
    x, y, scale = parts
    return wb.functional.clip_loss(normalize(x, dim=1), normalize(y, dim=1), scale)


def ddp_body(counts, sizes, keep):
    """Tied and untied encoders, a loss with another engine, and all in one module have the whole batch's gradient."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows = Partition(counts).rows(rank)
    size, (x, y) = sizes[rank % len(sizes)], batch(sum(counts))
    keep = keep[rank % len(keep)] if isinstance(keep, tuple) else keep

    for tied in (True, False):
        plain, loss_fn = [mlp(0), mlp(1)], Clip()
        if tied:
            plain[1] = plain[0]
        dense = copy.deepcopy(plain) if not tied else [copy.deepcopy(plain[0])] * 2
        single = copy.deepcopy(loss_fn)
        wb.reference.clip_loss(
            normalize(dense[0](x), dim=1), normalize(dense[1](y), dim=1), single.log_scale.exp()
        ).backward()
        models = [DistributedDataParallel(plain[0])]
        models.append(models[0] if tied else DistributedDataParallel(plain[1]))
        engine = DistributedDataParallel(loss_fn)
        reduced = [counting(model) for model in (*models[: 1 if tied else 2], engine)]
        for step in range(2):  # DDP rebuilds its buckets after the first
            wb.GradCache(models, size, engine, keep_graphs=keep)(x[rows], y[rows])
            assert_all_same(
                gradients_of(*plain[: 1 if tied else 2], loss_fn), gradients_of_kept(*dense[: 1 if tied else 2], single)
            )
            for buckets in reduced:
                assert buckets == [0], (step, buckets)
                buckets.clear()

    whole = Joint().train()
    alone = copy.deepcopy(whole)
    whole.text[2].eval(), alone.text[2].eval()  # the statistics of a chunk are not those of the batch
    joint_loss_dense(alone(x, y)).backward()
    model, true = DistributedDataParallel(whole), gradients_of_kept(alone)
    counted = counting(model)
    for _ in range(2):
        loss = wb.GradCache([model], size, joint_loss, keep_graphs=keep)([x[rows], y[rows]])
        assert_same(loss, joint_loss_dense(alone(x, y)).detach(), relative=1e-12)
        assert_all_same(gradients_of(whole), true)
        assert counted == [0]
        counted.clear()

    # One encoder for both inputs, with a scale among its outputs; the loss takes one of the two scales.
    tied = TwoParts()
    alone = copy.deepcopy(tied)
    (a, _, scale), (b, _, _) = alone(x), alone(y)
    joint_loss_dense((a, b, scale)).backward()
    engine = DistributedDataParallel(tied)
    reduced = counting(engine)
    for _ in range(2):
        wb.GradCache(
            [engine, engine],
            size,
            lambda of_x, of_y: joint_loss((of_x[0], of_y[0], of_x[1])),
            get_rep_fn=lambda out: (out[0], out[2]),
            keep_graphs=keep,
        )(x[rows], y[rows])
        assert_all_same(gradients_of(tied), gradients_of_kept(alone))
        assert reduced == [0]
        reduced.clear()

    # A parameter of the model that the loss reads directly, not through the engine.
    def past_the_engine(parts):
        return joint_loss((*parts[:2], whole.log_scale.exp()))

    wb.GradCache([model], size, past_the_engine, get_rep_fn=lambda out: out[:2], keep_graphs=keep)([x[rows], y[rows]])
    assert_all_same(gradients_of(whole), true)
    assert counted == [0]
    return world


def joint_loss_dense(parts):
    x, y, scale = parts
    return wb.reference.clip_loss(normalize(x, dim=1), normalize(y, dim=1), scale)


@pytest.mark.parametrize(
    ("counts", "sizes", "keep"),
    [
        ((7,), (3,), 1),
        ((4, 4), (1,), 0),
        ((4, 4), (4,), 1.0),
        ((7, 2), (2,), 0),
        ((7, 2), (1, 2), 1),
        ((7, 1), (1,), 1.0),
        ((5, 0, 4), (4, 2, 1), 1),
        ((3, 7, 1, 4), (1,), 0),
        ((7, 2), (2,), 2),
        ((4, 4), (2,), (0, 1.0)),
        ((5, 6), (1,), ("auto", 3)),
    ],
    ids=str,
)
def test_under_ddp_with_one_synchronization(counts, sizes, keep):
    assert run_ranks(ddp_body, len(counts), counts, sizes, keep, timeout_s=90) == [len(counts)] * len(counts)


def accumulated_body(counts, quiet):
    """Two cached steps of a joint model, then one optimizer step: the mean of two whole batches' losses."""
    rows, batches = Partition(counts).rows(dist.get_rank()), [batch(sum(counts), seed) for seed in (1, 2)]
    whole = Joint()
    whole.text[2].eval()  # a chunk's own statistics would be another batch's
    alone = copy.deepcopy(whole)
    sum(joint_loss_dense(alone(x, y)) / 2 for x, y in batches).backward()
    model = DistributedDataParallel(whole)
    reduced = counting(model)
    cache = wb.GradCache([model], 2, lambda parts: joint_loss(parts) / 2)
    for number, (x, y) in enumerate(batches):
        with model.no_sync() if quiet and number == 0 else nullcontext():
            cache([x[rows], y[rows]])
    assert reduced == ([0] if quiet else [0, 0])
    found = gradients_of(whole)
    assert_all_same(found, gradients_of_kept(alone))
    with model.no_sync():  # in both steps: then nothing is reduced, and this must show
        for x, y in batches:
            cache([x[rows], y[rows]])
    return (gradients_of(whole)[-1] - found[-1]).norm().item() / found[-1].norm().item()


@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("counts", [(4, 4), (6, 2)], ids=str)
def test_accumulation_of_cached_steps_under_ddp(counts, quiet):
    assert min(run_ranks(accumulated_body, 2, counts, quiet, timeout_s=90)) > 0.1


def training_body(counts, sizes, keep, engine):
    """A training step with dropout, another number of hard negatives in a third input, and a learned temperature."""
    rank = dist.get_rank()
    rows, local = Partition(counts).rows(rank), Partition([2 * count for count in counts]).rows(rank)
    size, (x, y), (n, _) = sizes[rank % len(sizes)], batch(sum(counts)), batch(2 * sum(counts), seed=1)
    plain, loss_fn = mlp(0, nn.Dropout(0.4)), Hard()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain[0], plain[3])
    of_loss = DistributedDataParallel(loss_fn)
    reduced = [counting(of_loss), *([counting(model)] if engine == "ddp" else [])]
    torch.manual_seed(7 + rank)
    loss = wb.GradCache([model] * 3, size, of_loss, keep_graphs=keep)(x[rows], y[rows], n[local])

    # The same masks on one process: each rank's, in the order in which the rank drew them.
    towers = [[], [], []]
    for other in range(len(counts)):
        torch.manual_seed(7 + other)
        at, of_other = Partition(counts).rows(other), Partition([2 * c for c in counts]).rows(other)
        for tower, z in zip(towers, (x[at], y[at], n[of_other]), strict=True):
            tower += [alone(part) for part in z.split(sizes[other % len(sizes)])]
    features = [torch.cat(parts) for parts in towers]
    true = single(*features, loss=wb.reference.info_nce_loss)
    true.backward()
    assert_same(loss, true.detach(), relative=1e-12)
    found = [p.grad.full_tensor() if engine == "fsdp2" else p.grad for p in model.parameters()]
    assert_all_same(found, gradients_of_kept(alone))
    assert_all_same(gradients_of_kept(loss_fn), gradients_of_kept(single))
    assert reduced == [[0]] * len(reduced)


class Hard(nn.Module):
    """InfoNCE against hard negatives, with a learned temperature."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x, y, n, loss=wb.functional.info_nce_loss):
        x, y, n = (normalize(z, dim=1) for z in (x, y, n))
        return loss(x, y, logit_scale=self.log_scale.exp(), negatives=n)


@pytest.mark.parametrize(
    ("counts", "sizes", "keep", "engine"),
    [
        ((7,), (3,), 0, "ddp"),
        ((7, 3), (2,), 0, "ddp"),
        ((3, 6), (4, 1), 0.5, "ddp"),
        ((4, 0, 5), (2,), 1, "ddp"),
        ((2, 5, 3, 4), (1, 2), 0, "ddp"),
        ((5, 4, 1, 3), (2,), "auto", "ddp"),
        ((4, 4), (2,), 0, "fsdp2"),
        ((5, 4), (2,), 1, "fsdp2"),
    ],
    ids=str,
)
def test_dropout_hard_negatives_and_a_learned_temperature(counts, sizes, keep, engine):
    run_ranks(training_body, len(counts), counts, sizes, keep, engine, timeout_s=90)


def fsdp_body(counts, keep):
    rows = Partition(counts).rows(dist.get_rank())
    x, y = batch(sum(counts))
    plain, loss_fn = mlp(0), Clip()
    alone, single = copy.deepcopy(plain), copy.deepcopy(loss_fn)
    single_loss = wb.reference.clip_loss(normalize(alone(x), dim=1), normalize(alone(y), dim=1), single.log_scale.exp())
    single_loss.backward()
    model = sharded(plain, plain[0], plain[2])
    for _ in range(2):
        loss = wb.GradCache([model, model], 2, loss_fn, keep_graphs=keep)(x[rows], y[rows])
        assert_same(loss, single_loss.detach(), relative=1e-12)
        for local, p in zip(model.parameters(), alone.parameters(), strict=True):
            assert_same(local.grad.full_tensor(), p.grad, relative=1e-10)
        assert_same(loss_fn.log_scale.grad, single.log_scale.grad, relative=1e-10)
        model.zero_grad()
        loss_fn.zero_grad()


@pytest.mark.parametrize(("counts", "keep"), [((4, 4), 0), ((4, 4), 1.0), ((5, 2), 1), ((0, 3), 0)], ids=str)
def test_under_fsdp2(counts, keep):
    run_ranks(fsdp_body, 2, counts, keep, timeout_s=90)


def odd_models_body():
    """Use engines behind a compiled module, a function or a method; and a loss that another engine shards."""
    rank = dist.get_rank()
    rows = Partition((6, 3)).rows(rank)
    x, y = batch(9)
    plain = mlp(0)
    true = dense_gradients(mlp(0), x, y)
    engine = DistributedDataParallel(plain)
    reduced = counting(engine)
    compiled = torch.compile(engine, backend="eager")
    for model in (compiled, lambda z: 1 * engine(z), engine.forward):
        for keep in (0, 1, 1.0):
            wb.GradCache([model, model], 2, good_loss, keep_graphs=keep)(x[rows], y[rows])
            assert_all_same(gradients_of(plain), true)
            assert reduced == [0], keep
            reduced.clear()

    # Two towers in one module; each call uses one of them, so none uses all parameters.
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList([mlp(0), mlp(1)])

        def forward(self, image=None, text=None):
            return self.towers[0](image) if text is None else self.towers[1](text)

    towers = Towers()
    dense = copy.deepcopy(towers)
    wb.reference.clip_loss(dense(image=x), dense(text=y), 1.0).backward()
    engine = DistributedDataParallel(towers, find_unused_parameters=True)
    for keep in (0, 2, 1.0):
        wb.GradCache([engine, engine], 2, good_loss, keep_graphs=keep)({"image": x[rows]}, {"text": y[rows]})
        assert_all_same(gradients_of(towers), gradients_of_kept(dense))

    encoder, single = mlp(0), Clip()
    wb.reference.clip_loss(*(normalize(mlp(0)(z), dim=1) for z in (x, y)), single.log_scale.exp()).backward()

    class Shaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_scale = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

        def forward(self, a, b):
            return wb.functional.clip_loss(normalize(a, dim=1), normalize(b, dim=1), self.log_scale.exp())

    loss_fn = sharded(Shaped())
    wb.GradCache([encoder, encoder], 2, loss_fn)(x[rows], y[rows])
    assert_same(loss_fn.log_scale.grad.full_tensor()[0], single.log_scale.grad, relative=1e-10)


def test_engines_are_found_in_wrappers_functions_and_losses():
    run_ranks(odd_models_body, 2, timeout_s=90)


def after_an_error_body(engine):
    """A second pass that differs on one rank raises on all; gradients are as before, and the next step is right."""
    rank = dist.get_rank()
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    plain = mlp(0)
    true = dense_gradients(mlp(0), x, y)
    model = DistributedDataParallel(plain) if engine == "ddp" else sharded(plain, plain[0], plain[2])
    for bad in (7, 8, 12):
        calls = [0]

        def encode(z, calls=calls, bad=bad):
            calls[0] += 1
            return model(z) * (1.5 if calls[0] == bad and rank == 1 else 1.0)

        with pytest.raises(RuntimeError if rank else ValueError, match="gave another representation"):
            wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
        assert all(p.grad is None for p in model.parameters())
        wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
        found = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
        assert_all_same(found, true)
        model.zero_grad()
    return True


def test_a_class_may_become_an_engine_after_a_step_and_is_not_kept():
    class Model(nn.Linear):
        pass

    model = Model(2, 2)
    assert synchronized([model]) == []
    Model.no_sync = nullcontext
    assert [engine.module for engine in synchronized([model])] == [model]
    kept = weakref.ref(Model)
    del model, Model
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_the_step_after_an_error_is_right(engine):
    assert run_ranks(after_an_error_body, 2, engine, timeout_s=60) == [True, True]


def no_empty_chunk_body():
    """Ranks with different numbers of chunks, for inputs without an empty form, raise if passes are collective."""
    model = sharded(nn.Embedding(4, OUT).double())
    texts = ["a", "bb", "ccc"] if dist.get_rank() else ["a"]

    def encode(texts):
        return model(torch.tensor([len(text) for text in texts]))

    cache = wb.GradCache(
        [encode, encode], 2, good_loss, lambda z, n: [{"texts": z[k : k + n]} for k in range(0, len(z), n)]
    )
    with pytest.raises(ValueError, match=r"different numbers of chunks, \[\[1, 1\], \[2, 2\]\]"):
        cache(texts, texts)
    with pytest.raises(ValueError, match="keep_graphs must be the same on all ranks"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs=dist.get_rank())(*[torch.arange(4)] * 2)
    with pytest.raises(ValueError, match="keep_graphs='auto' might keep another number"):
        wb.GradCache([model, model], 2, good_loss, keep_graphs="auto")(*[torch.arange(4)] * 2)


def test_missing_chunks_raise_if_passes_are_collective():
    run_ranks(no_empty_chunk_body, 2, timeout_s=60)


def fsdp_state_body():
    """Switches that the caller has turned off stay off; no state of a failed step remains."""
    rows = Partition((4, 4)).rows(dist.get_rank())
    x, y = batch(8)
    true = dense_gradients(mlp(0), x, y)
    plain, calls = mlp(0), [0]
    model = sharded(plain, plain[0], plain[2])
    step = wb.GradCache([model, model], 2, good_loss)
    with reductions() as reduced:
        model.set_requires_gradient_sync(False)
        step(x[rows], y[rows])
        assert reduced == [0]
        model.set_requires_gradient_sync(True)
        step(x[rows], y[rows])
        assert reduced == [2]
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], [2 * z for z in true])
    model.zero_grad()

    def fails(z):
        calls[0] += 1
        found = model(z)
        if calls[0] == 6:
            raise MemoryError("in the second chunk's second pass, on all ranks")
        return found

    with pytest.raises(MemoryError):
        wb.GradCache([fails, fails], 2, good_loss)(x[rows], y[rows])
    assert all(p.grad is None for p in model.parameters())
    step(x[rows], y[rows])
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], true)
    model.zero_grad()

    calls[0] = 0

    def loses_a_row(z):
        calls[0] += 1
        found = model(z)
        return found[:1] if calls[0] == 1 and dist.get_rank() else found

    with pytest.raises(ValueError, match="got 2 rows and returned 1"):
        wb.GradCache([loses_a_row, loses_a_row], 2, good_loss)(x[rows], y[rows])
    step(x[rows], y[rows])
    assert_all_same([p.grad.full_tensor() for p in model.parameters()], true)


def test_fsdp2s_switches_keep_the_callers_settings():
    run_ranks(fsdp_state_body, 2, timeout_s=60)


def renamed_body(counts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wholebatch.gradcache.engines.fsdp._SWITCHES", ("a name that FSDP2 does not have",))
        fsdp_body(counts, 0)


def test_fsdp2_with_renamed_switches_works():
    """The public switch works, too, but does not reveal the caller's setting (the test above then fails)."""
    run_ranks(renamed_body, 2, (4, 4), timeout_s=60)


def broadcast_body(counts):
    """DDP sets buffers to rank 0's in the first pass of a step; second passes must use these values, too."""
    rank = dist.get_rank()
    rows = Partition(counts).rows(rank)
    x, y = batch(sum(counts))
    x[rows] *= 1 + 4 * rank
    model = DistributedDataParallel(nn.Sequential(LateMaximum(), mlp(0)))
    for _ in range(3):
        plain = copy.deepcopy(model.module)
        for buffer in plain.buffers():
            dist.broadcast(buffer, 0)
        towers = [torch.cat([plain(part) for part in z[rows].split(2)]) for z in (x, y)]
        good_loss(*towers).backward()  # the local rows' gradients, W times, since an engine averages them
        true = [p.grad / dist.get_world_size() for p in plain.parameters()]
        for z in true:
            dist.all_reduce(z)
        wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
        assert_all_same(gradients_of(model), true)
        assert torch.equal(model.module[0].largest, plain[0].largest)


@pytest.mark.parametrize("counts", [(4, 4), (6, 2)], ids=str)
def test_second_passes_use_the_buffers_that_ddp_broadcasts(counts):
    run_ranks(broadcast_body, 2, counts, timeout_s=60)


def no_graph_body():
    """A chunk's representation without a graph on one rank raises on both, and the next step is right."""
    rank, calls = dist.get_rank(), [0]
    rows = Partition((6, 6)).rows(rank)
    x, y = batch(12)
    model = DistributedDataParallel(mlp(0))

    def encode(z):
        calls[0] += 1
        found = model(z)
        return found.detach() if rank and calls[0] in (8, 12) else found

    with pytest.raises((RuntimeError, ValueError), match="in the second pass, the output of model 0"):
        wb.GradCache([encode, encode], 2, good_loss)(x[rows], y[rows])
    assert all(p.grad is None for p in model.parameters())
    wb.GradCache([model, model], 2, good_loss)(x[rows], y[rows])
    assert_all_same(gradients_of(model), dense_gradients(mlp(0), x, y))


def test_a_missing_graph_in_the_second_pass_raises():
    run_ranks(no_graph_body, 2, timeout_s=60)
