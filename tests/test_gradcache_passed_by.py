"""Steps that bypass the engine, so that nothing reduces gradients, raise on every rank; models do not drift apart."""

import copy
import gc
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ddp import counting
from gradcache_towers import OUT, D, OfSubclass, Towers, batch, local_rows, loss_fn, without_checks
from torch import nn
from torch.func import functional_call
from torch.nn.functional import normalize
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.auditing.causes import NOT_REDUCED
from wholebatch.gradcache.engines.lost_gradients import live_engines
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

PASSED_BY = "must reach its parameters through the DistributedDataParallel that holds them"


def true_gradient(net, x, y):
    """Return the gradient of the whole batch on one process."""
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


def passed_by_body(counts, bypass, kind):
    (x, y), local = batch(sum(counts)), local_rows(counts)
    net = Towers()
    true, ddp = true_gradient(net, x, y), kind(net)
    step = wb.GradCache(PAST_THE_ENGINE[bypass](ddp), 2, loss_fn)
    for kept in (None, torch.ones):
        for p in net.parameters():
            p.grad = None if kept is None else kept(p.shape, dtype=p.dtype)
        with pytest.raises(ValueError, match=PASSED_BY) as error:
            step(*local)
        assert NOT_REDUCED.title in str(error.value)
        assert NOT_REDUCED.fix.partition("; a step")[0] in str(error.value)
        for p in net.parameters():
            assert p.grad is None if kept is None else torch.equal(p.grad, torch.ones_like(p)), "unchanged gradients"
    # Without the check the gradient is wrong; through the engine, whose state is unchanged, it is right.
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_checks(monkeypatch)
        net.zero_grad()
        loss = wb.GradCache([net.image, net.text], 2, loss_fn)(*local)
        cosine = torch.cosine_similarity(flat(net), true, dim=0).item()
    net.zero_grad()
    right = wb.GradCache([lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]], 2, loss_fn)
    assert torch.equal(right(*local), loss), "the loss does not reveal the mistake"
    assert_exact(net, true)
    return cosine


@pytest.mark.parametrize("bypass", PAST_THE_ENGINE)
@pytest.mark.parametrize("counts", [(4, 4), (5, 1, 2)], ids=str)
def test_a_step_that_bypasses_its_engine_raises(counts, bypass):
    cosines = run_ranks(passed_by_body, len(counts), counts, bypass, DistributedDataParallel, timeout_s=90)
    assert min(cosines) < 0.95


def test_a_step_that_bypasses_a_subclass_of_ddp_raises():
    run_ranks(passed_by_body, 2, (4, 4), "modules", OfSubclass, timeout_s=60)


def functional_body():
    ddp, (x, y) = DistributedDataParallel(Towers()), local_rows((4, 4))
    encode = wb.gradcache.cached(lambda z: 1 * ddp.module.image(z))
    r, again = encode(x)
    r.square().sum().backward()
    with pytest.raises(ValueError, match=PASSED_BY):
        again(r)
    assert all(p.grad is None for p in ddp.parameters())

    # Two functions of one engine: the second pass of the last one also finishes the other tower.
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
    """Use two functions of one DDP, each for one tower: the first step and the next ones are right."""
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
    # Earlier gradients are reduced with the new one, as in any accumulation; here they are equal on all ranks.
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
def test_two_functions_of_one_engine_are_exact(counts, sizes, keep, options):
    run_ranks(one_engine_body, len(counts), counts, sizes, keep, options, timeout_s=90)


def not_reached_body():
    """Leave out the zeros: the first step is not reduced, and torch raises in the second."""
    (x, y), local, net = batch(8), local_rows((4, 4)), Towers()
    true, ddp = true_gradient(net, x, y), DistributedDataParallel(net)
    models = [lambda a: ddp(x=a)[0], lambda b: ddp(y=b)[1]]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("wholebatch.gradcache.one_pass._missing_from_graph", lambda *_: [])
        wb.GradCache(models, 2, loss_fn)(*local)
        cosine = torch.cosine_similarity(flat(net), true, dim=0).item()
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            wb.GradCache(models, 2, loss_fn)(*local)
    return cosine


@pytest.mark.planted
def test_without_the_zeros_the_first_step_is_wrong():
    assert min(run_ranks(not_reached_body, 2, timeout_s=60)) < 0.95


def unused_body():
    """A parameter that no chunk reaches gets zeros, and the others are reduced."""
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


def test_a_parameter_that_no_chunk_reaches_gets_zeros():
    run_ranks(unused_body, 2, timeout_s=60)


class Hooked(nn.Module):
    """An engine that reduces in each parameter's hook: in place, or into its own storage as ZeRO does.

    Args:
        module: the module whose gradients it averages.
        takes: whether it moves gradients out of .grad; the last ones count.
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
    # Without the check.
    step._history.steps = 1
    step(*local)
    return torch.cosine_similarity(gradient(), true, dim=0).item()


def shared_towers():
    net = Towers()
    net.text = net.image
    return net


@pytest.mark.parametrize("takes", [False, True])
def test_a_registered_switch_that_holds_gradients_is_exact(takes):
    run_ranks(control_body, 2, takes, True, timeout_s=60)


def test_a_registered_switch_without_effect_raises():
    """If the engine stores reduced gradients itself, only the last chunk counts, equally on all ranks."""
    run_ranks(control_body, 2, False, False, timeout_s=60)
    assert max(run_ranks(control_body, 2, True, False, timeout_s=60)) < 0.95


def sparse_body(listens):
    """Register an engine around an embedding of integer inputs, with sparse gradients."""
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
def test_a_registered_switch_works_with_sparse_gradients(listens):
    run_ranks(sparse_body, 2, listens, timeout_s=60)


class Unknown(nn.Module):
    """An engine without any switch, which reduces where autograd's nodes have accumulated a gradient."""

    def __init__(self, module, *, node):
        super().__init__()
        self.module, self.kept = module, []
        for p in module.parameters():
            if node:
                accumulated = p.expand_as(p).grad_fn.next_functions[0][0]
                accumulated.register_hook(partial(self.reduce, p))
                self.kept.append(accumulated)
            else:
                p.register_post_accumulate_grad_hook(partial(self.reduce, p))

    def reduce(self, p, *_):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    def forward(self, z):
        return self.module(z)


def unknown_body(deferred, node):
    local, net = local_rows((4, 4)), Towers()
    engine = Unknown(net.image, node=node)
    step = wb.GradCache([engine, engine], 2, loss_fn, deferred=deferred)
    with pytest.raises(ValueError, match=r"(?i)an engine that gradient caching does not know") as error:
        step(*local).backward()
    assert "register_sync_control" in str(error.value)
    assert len(str(error.value).splitlines()) < 12, "ten lines"
    assert all(p.grad is None for p in net.parameters())


@pytest.mark.parametrize(("deferred", "node"), [(True, True), (True, False), (False, True)])
def test_an_engine_that_is_not_known_raises(deferred, node):
    run_ranks(unknown_body, 2, deferred, node, timeout_s=60)


def engines_body():
    engine = DistributedDataParallel(nn.Linear(2, 2))
    gc.freeze()
    while_frozen = live_engines()
    gc.unfreeze()
    found = live_engines()
    return [x is engine for x in while_frozen], [x is engine for x in found], gc.get_freeze_count()


def test_engines_are_found_among_frozen_objects_and_others_which_are_not_frozen():
    assert run_ranks(engines_body, 2) == [([True], [True], 0)] * 2
