"""Gradients that no engine reduces: an error of the step, on every rank, instead of models that drift apart."""

import copy
import gc
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ddp import counting
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch._sharded import is_sharded, mark_sharded
from wholebatch.auditing.causes import NOT_REDUCED
from wholebatch.gradcache.passed_by import live_ddp
from wholebatch.gradcache.replicas import _weights, checksums, due
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

D, OUT = 5, 4
PASSED_BY = "must reach its parameters through the DistributedDataParallel that holds them"
APART = "an optimizer step has driven them apart"


class Towers(nn.Module):
    """A CLIP whose forward takes either input, or both."""

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


def true_gradient(net, x, y):
    """Of the whole batch on one process."""
    net = copy.deepcopy(net)
    net.zero_grad()
    wb.reference.clip_loss(*(normalize(z, dim=1) for z in (net.image(x), net.text(y))), 5.0).backward()
    return flat(net)


def flat(net):
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def assert_exact(net, true):
    found = flat(net)
    assert found.shape == true.shape
    assert (found - true).norm() <= 1e-10 * true.norm()


def local_rows(counts):
    rows = Partition(counts).rows(dist.get_rank())
    return [z[rows] for z in batch(sum(counts))]


def without_checks(monkeypatch):
    """As before there were any."""
    monkeypatch.setattr("wholebatch.gradcache.step.check_not_passed_by", lambda *_: None)
    monkeypatch.setattr("wholebatch.gradcache.step.due", lambda _: False)


class OfSubclass(DistributedDataParallel):
    """As frameworks derive them."""


def helper(model, z):
    return model.module.image(z)


PAST_THE_ENGINE = {
    "modules": lambda ddp: [ddp.module.image, ddp.module.text],
    "one of them": lambda ddp: [lambda a: ddp(x=a)[0], ddp.module.text],
    "the wrapped module": lambda ddp: [lambda a: ddp.module(x=a)[0], lambda b: ddp.module(y=b)[1]],
    "functions": lambda ddp: [lambda a: helper(ddp, a), lambda b: 1 * ddp.module.text(b)],
    "a method": lambda ddp: [ddp.module.image.forward, lambda b: ddp.module.text[2](torch.tanh(ddp.module.text[0](b)))],
    "called with its parameters": lambda ddp: [
        lambda a: functional_call(ddp.module.image, dict(ddp.module.image.named_parameters()), a),
        ddp.module.text,
    ],
}


def passed_by_body(counts, way, kind):
    (x, y), local = batch(sum(counts)), local_rows(counts)
    net = Towers()
    true, ddp = true_gradient(net, x, y), kind(net)
    step = wb.GradCache(PAST_THE_ENGINE[way](ddp), 2, loss_fn)
    for kept in (None, torch.ones):
        for p in net.parameters():
            p.grad = None if kept is None else kept(p.shape, dtype=p.dtype)
        with pytest.raises(ValueError, match=PASSED_BY) as error:
            step(*local)
        assert NOT_REDUCED.title in str(error.value)
        assert NOT_REDUCED.fix.partition("; a step")[0] in str(error.value)
        for p in net.parameters():
            assert p.grad is None if kept is None else torch.equal(p.grad, torch.ones_like(p)), "as they were"
    # It is wrong without the error, and right through the engine, which is as it was.
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_checks(monkeypatch)
        net.zero_grad()
        loss = wb.GradCache([net.image, net.text], 2, loss_fn)(*local)
        cosine = torch.cosine_similarity(flat(net), true, dim=0).item()
    net.zero_grad()
    right = wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 2, loss_fn)
    assert torch.equal(right(*local), loss), "the loss shows nothing"
    assert_exact(net, true)
    return cosine


@pytest.mark.parametrize("way", PAST_THE_ENGINE)
@pytest.mark.parametrize("counts", [(4, 4), (5, 1, 2)], ids=str)
def test_an_engine_that_is_passed_by(counts, way):
    cosines = run_ranks(passed_by_body, len(counts), counts, way, DistributedDataParallel, timeout_s=90)
    assert min(cosines) < 0.95


def test_an_engine_of_a_class_derived_from_ddp_that_is_passed_by():
    run_ranks(passed_by_body, 2, (4, 4), "modules", OfSubclass, timeout_s=60)


def functional_body():
    ddp, (x, y) = DistributedDataParallel(Towers()), local_rows((4, 4))
    encode = wb.gradcache.cached(lambda z: 1 * ddp.module.image(z))
    r, again = encode(x)
    r.square().sum().backward()
    with pytest.raises(ValueError, match=PASSED_BY):
        again(r)
    assert all(p.grad is None for p in ddp.parameters())

    # Two functions of one engine: the last one goes back through the other tower, too.
    net = ddp.module
    true = true_gradient(net, *batch(8))
    towers = [wb.gradcache.cached(lambda z: ddp(x=z)[0]), wb.gradcache.cached(lambda z: ddp(y=z)[1])]
    for _ in range(2):
        calls = [[tower(part) for part in z.split(2)] for tower, z in zip(towers, (x, y), strict=True)]
        wb.gradcache.cat_input_tensor(loss_fn)(*([r for r, _ in of_tower] for of_tower in calls)).backward()
        for r, again in [*calls[0], *calls[1]]:
            again(r)
        assert_exact(net, true)
        net.zero_grad()


def test_the_functional_form():
    run_ranks(functional_body, 2, timeout_s=60)


def one_engine_body(counts, sizes, keep, options):
    """Two functions of one DDP, each of one of its towers: right in the first step, and in the next."""
    (x, y), local = batch(sum(counts)), local_rows(counts)
    net = Towers()
    true, ddp = true_gradient(net, x, y), DistributedDataParallel(net, **options)
    reduced = counting(ddp)
    step = wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], sizes, loss_fn, keep_graphs=keep)
    for _ in range(3):
        step(*local)
        assert_exact(net, true)
        assert reduced == [0]
        reduced.clear()
        net.zero_grad()
    # Gradients that were there before are reduced with it, as in any accumulation; here they are alike.
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    step(*local)
    assert_exact(net, true + 1)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize(
    ("counts", "sizes", "keep"),
    [((4, 4), 2, 0), ((7, 2), [1, 3], 1.0), ((5, 0, 3), 2, 1)],
    ids=str,
)
def test_two_functions_of_one_engine(counts, sizes, keep, options):
    run_ranks(one_engine_body, len(counts), counts, sizes, keep, options, timeout_s=90)


def not_reached_body():
    """Without the zeros the first step goes out unreduced, and torch raises in the second."""
    (x, y), local, net = batch(8), local_rows((4, 4)), Towers()
    true, ddp = true_gradient(net, x, y), DistributedDataParallel(net)
    models = [lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("wholebatch.gradcache.second_pass.zeros_for_awaited", lambda *_: [])
        wb.GradCache(models, 2, loss_fn)(*local)
        cosine = torch.cosine_similarity(flat(net), true, dim=0).item()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            wb.GradCache(models, 2, loss_fn)(*local)
    return cosine


def test_without_the_zeros_the_first_step_is_wrong():
    assert min(run_ranks(not_reached_body, 2, timeout_s=60)) < 0.95


def unused_body():
    """A parameter that no chunk reaches: the others are reduced, and it gets zeros."""
    (x, y), local, net = batch(8), local_rows((4, 4)), Towers()
    true = true_gradient(net, x, y)
    net.unused = nn.Linear(2, 2).double()
    ddp = DistributedDataParallel(net)
    for _ in range(2):
        wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 2, loss_fn)(*local)
        assert not net.unused.weight.grad.any()
        net.unused.zero_grad()
        assert_exact(net, true)
        net.zero_grad()


def test_a_parameter_that_nothing_reaches():
    run_ranks(unused_body, 2, timeout_s=60)


# Switches that users register.
class Hooked(nn.Module):
    """An engine that reduces in each parameter's hook: in place, or to a place of its own as ZeRO does.

    Args:
        module: whose gradients it averages.
        takes: whether it takes them out of .grad; the last ones count.
        listens: whether it does nothing while it is held.
    """

    def __init__(self, module, *, takes, listens):
        super().__init__()
        self.module, self.takes, self.listens, self.held, self.local = module, takes, listens, False, {}
        for p in module.parameters():
            p.register_post_accumulate_grad_hook(self.accumulated)

    def accumulated(self, p):
        if self.held and self.listens:
            return
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()
        if self.takes:
            self.local[p], p.grad = p.grad, None

    @contextmanager
    def hold(self):
        self.held = True
        yield
        self.held = False

    def forward(self, z):
        return self.module(z)


def control_body(takes, listens):
    local, net = local_rows((4, 4)), Towers()
    true, net.text = true_gradient(shared_towers(), *batch(8)), None
    engine = Hooked(net.image, takes=takes, listens=listens)
    wb.gradcache.register_sync_control(
        wb.gradcache.SyncControl(lambda module: isinstance(module, Hooked), Hooked.hold, collective=False)
    )

    def gradient():
        return torch.cat([(engine.local[p] if takes else p.grad).flatten() for p in net.image.parameters()])

    step = wb.GradCache([engine, engine], 2, loss_fn)
    if listens:
        for _ in range(2):
            step(*local)
            assert (gradient() - true).norm() <= 1e-10 * true.norm()
            net.zero_grad()
        return 1.0
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"must leave gradients in \.grad while the `hold` of its registered"
        ) as error:
            step(*local)
        assert ("took the gradient out of" if takes else "changed the gradient") in str(error.value)
        assert all(p.grad is None for p in net.parameters())
    # Without the look.
    step._steps = 1
    step(*local)
    return torch.cosine_similarity(gradient(), true, dim=0).item()


def shared_towers():
    net = Towers()
    net.text = net.image
    return net


@pytest.mark.parametrize("takes", [False, True])
def test_a_switch_that_works(takes):
    run_ranks(control_body, 2, takes, True, timeout_s=60)


def test_a_switch_that_does_nothing():
    """Where the engine keeps what it has reduced, the last chunk alone counts: on all ranks alike."""
    run_ranks(control_body, 2, False, False, timeout_s=60)
    assert max(run_ranks(control_body, 2, True, False, timeout_s=60)) < 0.95


def sparse_body(listens):
    """A registered engine around an embedding with sparse gradients, of integer inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.EmbeddingBag(9, D, mode="sum", sparse=True), nn.Linear(D, OUT)).double()
    tokens = torch.randint(0, 9, (2, 8, 3), generator=torch.Generator().manual_seed(1))
    alone = copy.deepcopy(net)
    wb.reference.clip_loss(*(normalize(alone(z), dim=1) for z in tokens), 5.0).backward()
    engine = Hooked(net, takes=False, listens=listens)
    wb.gradcache.register_sync_control(
        wb.gradcache.SyncControl(lambda module: isinstance(module, Hooked), Hooked.hold, collective=False)
    )
    step = wb.GradCache([engine, engine], 2, loss_fn)
    local = [z[Partition((4, 4)).rows(dist.get_rank())] for z in tokens]
    if not listens:
        with pytest.raises(ValueError, match=r"and changed the gradient of a parameter"):
            step(*local)
        return
    for _ in range(2):
        step(*local)
        assert net[0].weight.grad.is_sparse
        for ours, true in zip(net.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.to_dense(), true.grad.to_dense(), rtol=1e-10, atol=1e-14)
        net.zero_grad()


@pytest.mark.parametrize("listens", [True, False])
def test_a_switch_around_sparse_gradients(listens):
    run_ranks(sparse_body, 2, listens, timeout_s=60)


# What only shows after a step of an optimizer.
def drift_body(counts, what):
    """Without an engine: an error before the second step, naming the first parameter that differs."""
    local, net = local_rows(counts), Towers()
    scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
    models = [net.image, net.text] if what == "modules" else [lambda a: net(x=a)[0], lambda b: net(y=b)[1]]
    head = nn.Linear(OUT, OUT).double()
    torch.nn.init.eye_(head.weight)

    def with_parameters(a, b):
        return loss_fn(head(a), b) * scale.exp()

    trained = [*net.parameters()]
    if what == "of the loss":
        for p in net.parameters():
            p.requires_grad_(False)
        net.image[2].weight.requires_grad_(True)
        net.text[2].weight.requires_grad_(True)
        trained = [*head.parameters(), scale]
    step = wb.GradCache(models, 2, with_parameters if what == "of the loss" else loss_fn)
    step(*local)
    torch.optim.SGD(trained, lr=0.1).step()
    before = [None if p.grad is None else p.grad.clone() for p in (*net.parameters(), *head.parameters())]
    with pytest.raises(ValueError, match=APART) as error:
        step(*local)
    for p, grad in zip((*net.parameters(), *head.parameters()), before, strict=True):
        assert p.grad is None if grad is None else torch.equal(p.grad, grad), "as they were"
    return str(error.value)


@pytest.mark.parametrize("counts", [(4, 4), (5, 1, 2)], ids=str)
@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("modules", r"'0.weight' of model 0 (Sequential) (8, 5)"),
        ("functions", r"'image.0.weight' of model 0 (function) (8, 5)"),
        ("of the loss", r"'weight' of loss_fn (4, 4)"),
    ],
)
def test_parameters_that_drift_apart(counts, what, name):
    messages = run_ranks(drift_body, len(counts), counts, what, timeout_s=60)
    assert len(set(messages)) == 1, "the same on all ranks"
    assert name in messages[0]
    assert NOT_REDUCED.title in messages[0]


def changed_body(change, steps):
    """One rank's parameter is changed in some way after so many steps: noticed by the next one that looks."""
    local, net = local_rows((4, 4)), Towers()
    ddp = DistributedDataParallel(net)
    step = wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 4, loss_fn)
    for _ in range(steps):
        step(*local)
    with torch.no_grad():
        if dist.get_rank() == 1:
            CHANGES[change](net.text[2].weight)
    message = APART if steps else "they differ before the first step of this GradCache. Make models from the same seed"

    def go_on():
        for _ in range(steps, 100):
            step(*local)

    with pytest.raises(ValueError, match=message) as error:
        go_on()
    assert "'module.text.2.weight' of model 0 (function)" in str(error.value)


def flip_a_bit(p):
    p.view(torch.int64)[0, 0] ^= 1


CHANGES = {
    "a bit": flip_a_bit,
    "a sign": lambda p: p[3, 7].neg_(),
    "all signs": lambda p: p.neg_(),
    "two entries": lambda p: p[0, :2].copy_(p[0, :2].flip(0)),
}


@pytest.mark.parametrize(
    ("change", "steps"), [*((change, 2) for change in CHANGES), ("a bit", 0), ("a bit", 1), ("a bit", 97)]
)
def test_any_change_is_noticed(change, steps):
    run_ranks(changed_body, 2, change, steps, timeout_s=90)


def test_which_steps_are_looked_at():
    assert [n + 1 for n in range(301) if due(n)] == [1, 2, 3, 100, 200, 300]


def test_no_way_to_know_needs_the_comparison():
    """With the comparison planted off, ranks drift apart without a word."""
    assert run_ranks(silent_drift_body, 2, timeout_s=60) == [True, True]


def silent_drift_body():
    local, net = local_rows((4, 4)), Towers()
    step, optimizer = wb.GradCache([net.image, net.text], 2, loss_fn), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_checks(monkeypatch)
        for _ in range(3):
            step(*local)
            optimizer.step()
    everyones = [None, None]
    dist.all_gather_object(everyones, net.image[0].weight.detach())
    return not torch.equal(*everyones)


# The checksum.
def test_checksums_see_every_bit():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        x = torch.randn(7, 3, generator=generator).to(dtype)
        local = checksums({"x": x})["x"]
        assert checksums({"x": x.clone()})["x"] == local
        raw = x.clone().view(-1).view(torch.uint8)
        seen = {local}
        for at in range(len(raw)):
            for bit in range(8):
                raw[at] ^= 1 << bit
                seen.add(checksums({"x": raw.view(dtype).view(7, 3)})["x"])
                raw[at] ^= 1 << bit
        assert len(seen) == 1 + 8 * len(raw)


def test_checksums_whatever_the_default_device_is():
    x = torch.randn(5, generator=torch.Generator().manual_seed(0))
    local = checksums({"x": x})
    _weights.cache_clear()
    with torch.device("meta"):
        assert checksums({"x": x}) == local


def test_checksums_see_order_in_large_tensors():
    """Of numbers whose bits end with many zeros, and beyond a block."""
    x = torch.ones(3 * 2**18 + 5, dtype=torch.float64)
    seen = set()
    for at in (None, 0, 1, 2, 2048, 2**17, 2**18, 2**18 + 1, 3 * 2**18 + 4):
        moved = x.clone()
        if at is not None:
            moved[at] = 2.0
        seen.add(checksums({"x": moved})["x"])
    assert len(seen) == 9
    rows = torch.arange(2**19, dtype=torch.float32)
    assert checksums({"x": rows})["x"] != checksums({"x": rows.view(2, -1).flip(0).reshape(-1)})["x"]
    assert checksums({"x": rows.view(2, -1)}) == checksums({"x": rows.view(2, -1).t().contiguous().t()})
    assert checksums({"none": torch.zeros(0), "nan": torch.tensor(float("nan"))}) == checksums(
        {"none": torch.zeros(0), "nan": torch.tensor(float("nan"))}
    )


# No false alarms.
def reduced_by_hand(net):
    for p in net.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def train(net, step, local, *, by_hand=False, steps=4):
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        step(*local)
        if by_hand:
            reduced_by_hand(net)
        optimizer.step()
        optimizer.zero_grad()


class Own(nn.Module):
    """Experts of which each rank has its own, beside a layer that all have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(D, OUT).double()
        torch.manual_seed(1 + dist.get_rank())
        self.expert = nn.Linear(OUT, OUT).double()

    def forward(self, z):
        return self.expert(self.common(z))


def no_alarm_body(counts):
    local = local_rows(counts)

    net = Towers()
    ddp = DistributedDataParallel(net)
    train(net, wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 2, loss_fn), local)

    net = Towers()
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), local, by_hand=True)
    net.text.requires_grad_(False)  # frozen, and other ones on each rank
    with torch.no_grad():
        net.text[0].weight += dist.get_rank()

    def half_frozen(a, b):
        return loss_fn(a, b)

    constant = net.text(local[1]).detach()
    one = wb.GradCache([net.image], 2, lambda a: half_frozen(a, constant))
    train(net, lambda x, _y: one(x), local, by_hand=True)

    shared = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Linear(8, OUT)).double()  # with buffers that differ
    with torch.no_grad():
        for p in shared.parameters():
            dist.broadcast(p, 0)
    shared[1].eval()
    shared[1].running_mean += dist.get_rank()
    train(shared, wb.GradCache([shared, shared], 2, loss_fn), local, by_hand=True)

    plain = Towers()
    for tower in (plain.image, plain.text):
        fully_shard(tower)
    train(plain, wb.GradCache([plain.image, plain.text], 2, loss_fn), local)
    train(plain, wb.GradCache([plain.image, lambda b: 1 * plain.text(b)], 2, loss_fn), local)

    # An engine that held the module once, and is gone.
    net = Towers()
    DistributedDataParallel(net)
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), local, by_hand=True)

    # One that is there, whose user reduces by hand and says so; and parameters that each rank has of its own.
    net = Towers()
    ddp = DistributedDataParallel(net)
    step = wb.GradCache([ddp.module.image, ddp.module.text], 2, loss_fn, unchecked=net.parameters())
    train(net, step, local, by_hand=True)
    model = Own()
    with pytest.raises(ValueError, match=r"different values of 'expert.weight' of model 0 \(Own\).*go into unchecked="):
        wb.GradCache([model, model], 2, loss_fn)(*local)
    model.zero_grad()
    train(
        model.common,
        wb.GradCache([model, model], 2, loss_fn, unchecked=model.expert.parameters()),
        local,
        by_hand=True,
    )
    model.expert.weight.allreduce = model.expert.bias.allreduce = False  # as DeepSpeed marks its experts
    train(model.common, wb.GradCache([model, model], 2, loss_fn), local, by_hand=True)

    # Functions that call other modules on other ranks, of the same shapes.
    rank, towers = dist.get_rank(), [Towers(seed).image for seed in range(dist.get_world_size())]
    step = wb.GradCache([lambda a: 1 * towers[rank](a), lambda b: 2 * towers[rank](b)], 2, loss_fn)
    train(nn.ModuleList(towers), step, local, by_hand=False)
    return True


@pytest.mark.parametrize("counts", [(4, 4), (6, 1, 3)], ids=str)
def test_no_false_alarm(counts):
    assert all(run_ranks(no_alarm_body, len(counts), counts, timeout_s=120))


def head_body(counts):
    """A head whose classes are spread over the ranks, beside a backbone of which all hold a copy."""
    (x, _), labels = local_rows(counts), torch.arange(sum(counts))[Partition(counts).rows(dist.get_rank())]
    for rate in (1.0, 0.5):
        net = Towers()
        ddp = DistributedDataParallel(net.image)
        head = copy.deepcopy(wb.PartialFC(OUT, 12, sample_rate=rate, dtype=torch.float64))
        step = wb.GradCache([ddp], 2, lambda a, labels, head=head: head(a, labels))
        optimizers = [torch.optim.SGD(net.image.parameters(), lr=0.1), wb.SparseSGD(head.parameters(), lr=0.1)]
        for _ in range(4):
            step(x, labels=labels)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    # A function of centers, in half precision and of a parameter of the caller's.
    torch.manual_seed(dist.get_rank())
    centers = nn.Parameter(torch.randn(3, OUT))
    step = wb.GradCache(
        [ddp], 2, lambda a, labels: wb.functional.partial_fc_loss(a, labels % 3, centers.double(), num_classes=None)
    )
    step(x, labels=labels)
    assert is_sharded(centers)

    # Clipped by each rank's own norm, as frameworks do: the backbone's copies differ after one step.
    net = Towers()
    ddp, head = DistributedDataParallel(net.image), wb.PartialFC(OUT, 12, dtype=torch.float64)
    step = wb.GradCache([ddp], 2, head)
    both = [*net.image.parameters(), *head.parameters()]
    step(x, labels=labels)
    torch.nn.utils.clip_grad_norm_(both, 0.1)
    torch.optim.SGD(both, lr=0.1).step()
    with pytest.raises(ValueError, match="or not alike"):
        step(x, labels=labels)


@pytest.mark.parametrize("counts", [(4, 4), (5, 0, 3)], ids=str)
def test_a_head_of_which_each_rank_has_a_part(counts):
    run_ranks(head_body, len(counts), counts, timeout_s=90)


def test_on_one_rank_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr("wholebatch.gradcache.replicas.checksums", None)
    monkeypatch.setattr("wholebatch.gradcache.passed_by.live_ddp", list)
    net = Towers()
    train(net, wb.GradCache([net.image, net.text], 2, loss_fn), batch(6))
    assert run_ranks(one_rank_body, 1) == [True]


def one_rank_body():
    ddp = DistributedDataParallel(Towers())
    train(ddp, wb.GradCache([ddp.module.image, ddp.module.text], 2, loss_fn), batch(6))
    return True


def test_the_collector_knows_the_engines():
    """What `live_ddp` rests on, whatever the release of Python and torch."""
    assert run_ranks(live_body, 2) == [[1, 2, 0]] * 2


def live_body():
    found = []
    one = DistributedDataParallel(Towers())
    found.append(len([*live_ddp()]))
    other = OfSubclass(Towers())
    found.append(len([*live_ddp()]))
    assert {id(x) for x in live_ddp()} == {id(one), id(other)}
    gc.freeze()  # before forks, as users do
    assert {id(x) for x in live_ddp()} == {id(one), id(other)}
    assert gc.get_freeze_count() > 0
    gc.unfreeze()
    del one, other
    gc.collect()
    return [*found, len([*live_ddp()])]


@pytest.mark.parametrize("unchecked", [nn.Linear(2, 2), torch.zeros(2), 3, ["weight"], None])
def test_what_is_unchecked_are_parameters(unchecked):
    with pytest.raises(ValueError, match="unchecked must be a list of parameters"):
        wb.GradCache([nn.Linear(2, 2)], 2, loss_fn, unchecked=unchecked)


def test_marks():
    net = nn.Linear(2, 2)
    mark_sharded(net.weight.float() * 2, None)
    assert is_sharded(net.weight)
    assert not is_sharded(net.bias)
