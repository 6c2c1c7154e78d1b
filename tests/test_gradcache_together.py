"""Several deferred steps in one backward pass: of other groups, with other switches, kept graphs, and errors."""

import copy
import gc
import threading

import pytest
import torch
import torch.distributed as dist
from gradcache_models import OUT, Clip, D, assert_all_same, batch, good_loss, gradients_of, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import wholebatch as wb
from wholebatch.gradcache.encode import _HISTORIES
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks


class Counting(nn.Module):
    """A model whose output changes in its calls from this number on, on one rank."""

    def __init__(self, fails_from, rank):
        super().__init__()
        self.net, self.calls, self.fails_from = mlp(0), 0, fails_from if dist.get_rank() == rank else 10**9

    def forward(self, x):
        self.calls += 1
        return self.net(x) * (1.0 if self.calls < self.fails_from else 1.01)


def groups_body():
    """An error in the passes of one rank ends the steps of all groups, on all their ranks."""
    x, y = batch(4)
    model = Counting(5, 0)
    alone = wb.GradCache([model, model], 4, good_loss, deferred=True, group=wb.comm.LocalCommunicator())
    together = wb.GradCache([model, model], 4, good_loss, deferred=True)
    kind = RuntimeError if dist.get_rank() == 0 else ValueError
    with pytest.raises(kind, match="gave another representation 0 than the first"):
        (alone(x, y) + together(x, y)).backward()
    assert all(p.grad is None for p in model.parameters())


def test_an_error_ends_the_steps_of_all_groups():
    run_ranks(groups_body, 2, timeout_s=60)


def drift_body(roles):
    """Nobody reduces the gradients: the comparison notices it, however often a step calls the encoder."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = batch(4, seed=dist.get_rank())

    def loss():
        return sum(wb.gradcache.encode(model, x, 2).square().sum() for _ in range(roles))

    loss().backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="an optimizer step has driven them apart"):
        loss().backward()


@pytest.mark.parametrize("roles", [1, 2, 4])
def test_calls_in_one_backward_pass_are_one_step(roles):
    run_ranks(drift_body, 2, roles, timeout_s=60)


def test_steps_are_counted_by_their_first_module():
    model, (x, y) = mlp(0), batch(4)
    for _ in range(2):
        (wb.gradcache.encode(model, x, 2) - wb.gradcache.encode(model, y, 2)).square().sum().backward()
    assert _HISTORIES[model].steps == 2


def switches_body(first_is_off):
    """An engine synchronizes if one of the forward passes is outside of no_sync(), as without caching."""
    rows = Partition((4, 2)).rows(dist.get_rank())
    x, y = (z[rows] for z in batch(6))
    found = []
    for cached in (True, False):
        plain = mlp(0)
        model = DistributedDataParallel(plain)
        encode = (lambda z, m=model: wb.gradcache.encode(m, z, 2)) if cached else model
        if first_is_off:
            with model.no_sync():
                a = encode(x)
            b = encode(y)
        else:
            a = encode(x)
            with model.no_sync():
                b = encode(y)
        good_loss(a, b).backward()
        found.append(gradients_of(plain))
    assert_all_same(*found)
    return [z.sum().item() for z in found[0]]


@pytest.mark.parametrize("first_is_off", [False, True])
def test_one_forward_pass_outside_of_no_sync_synchronizes(first_is_off):
    ours, others = run_ranks(switches_body, 2, first_is_off, timeout_s=60)
    assert ours == others, "reduced"


@pytest.mark.parametrize("accumulated", [False, True])
def test_the_gradient_of_an_input_is_restored(accumulated):
    inner, calls = mlp(0), [0]
    x = batch(6)[0].requires_grad_()
    model = nn.Sequential(inner)

    def fail(_module, _args, out):
        calls[0] += 1
        return out * (1.0 if calls[0] < 6 else 1.01)

    model.register_forward_hook(fail)
    x.grad = torch.ones_like(x) if accumulated else None
    r = wb.gradcache.encode(model, x, 2)
    with pytest.raises(RuntimeError, match="gave another representation"):
        r.square().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x)) if accumulated else x.grad is None
    assert all(p.grad is None for p in model.parameters())


def test_the_gradient_of_an_input_is_that_of_the_model():
    model, x = mlp(0), batch(6)[0].requires_grad_()
    (true,) = torch.autograd.grad(model(x).square().sum(), x)
    wb.gradcache.encode(model, x, 4).square().sum().backward()
    torch.testing.assert_close(x.grad, true, rtol=1e-12, atol=0)


class Clamped(nn.Module):
    """A model that clamps its temperature in each forward pass."""

    def __init__(self):
        super().__init__()
        self.net, self.temperature = mlp(0), nn.Parameter(torch.tensor([0.7], dtype=torch.float64))

    def forward(self, x):
        with torch.no_grad():
            self.temperature.clamp_(0.001, 0.5)
        return self.net(x) / self.temperature


def test_a_parameter_that_the_model_clamps_is_no_change():
    model, (x, y) = Clamped(), batch(6)
    plain = copy.deepcopy(model)
    plain(x)  # which clamps; in one graph with a second call, it could not
    good_loss(plain.net(x) / plain.temperature, plain.net(y) / plain.temperature).backward()
    good_loss(wb.gradcache.encode(model, x, 2), wb.gradcache.encode(model, y, 2)).backward()
    assert_all_same(gradients_of(model), gradients_of(plain))


def test_kept_graphs_of_two_losses_go_backward_one_after_the_other():
    """Nothing is encoded again, so the second pass of one does not touch buffers that the other needs."""
    model, (x, y) = mlp(0, nn.BatchNorm1d(8)), batch(8)
    plain = copy.deepcopy(model)
    for z in (x, y):
        torch.cat([plain(part) for part in z.split(4)]).square().sum().backward()
    a, b = (wb.gradcache.encode(model, z, 4, keep_graphs=1.0) for z in (x, y))
    b.square().sum().backward()
    a.square().sum().backward()
    assert_all_same(gradients_of(model), gradients_of(plain))
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name


@pytest.mark.parametrize("cached_first", [False, True])
def test_gradients_of_other_losses_stay_after_an_error(cached_first):
    model, calls, (x, _) = mlp(0), [0], batch(4)

    def encode(z):
        calls[0] += 1
        return model(z) * (1.0 if calls[0] < 4 else 1.01)

    def other():
        return model[0].weight.square().sum()

    if cached_first:
        r = wb.gradcache.encode(encode, x, 2)
        loss = r.sum() + other()
    else:
        first = other()
        loss = first + wb.gradcache.encode(encode, x, 2).sum()
    with pytest.raises(RuntimeError, match="gave another representation"):
        loss.backward()
    torch.testing.assert_close(model[0].weight.grad, 2 * model[0].weight.detach())
    assert model[0].bias.grad is None


def test_a_failed_backward_pass_says_so_when_it_is_repeated():
    model, calls, (x, y) = mlp(0), [0], batch(4)

    def encode(z):
        calls[0] += 1
        return model(z) * (1.0 if calls[0] < 4 else 1.01)

    loss = wb.GradCache([encode, model], 2, good_loss, deferred=True)(x, y)
    with pytest.raises(RuntimeError, match="gave another representation"):
        loss.backward(retain_graph=True)
    with pytest.raises(ValueError, match="has had its backward pass, and it has failed: call GradCache again"):
        loss.backward()


def other_groups_body(order):
    """A parameter of a loss of one rank has changed: the loss of all ranks, which is right, raises on all."""
    x, y = batch(4)
    models = [mlp(0), mlp(1)]
    alone = wb.GradCache([models[0]] * 2, 2, good_loss, deferred=True, group=wb.comm.LocalCommunicator())
    together = wb.GradCache([models[1]] * 2, 2, good_loss, deferred=True)
    losses = [cache(x, y) for cache in ((alone, together) if order else (together, alone))]
    if dist.get_rank() == 0:
        with torch.no_grad():
            models[0][0].bias.add_(1)
    with pytest.raises(ValueError, match=r"has been changed since the forward pass"):
        sum(losses).backward()
    assert all(p.grad is None for model in models for p in model.parameters())
    together(x, y).backward()


@pytest.mark.parametrize("order", [False, True])
def test_a_mistake_in_one_group_raises_in_all(order):
    run_ranks(other_groups_body, 2, order, timeout_s=60)


def local_loss_body(deferred):
    """A loss may be of other ranks than the step: its mistake on one rank is raised by all ranks of the step."""
    (x, y), model = batch(4), mlp(0)
    wrong = dist.get_rank() == 1

    def loss_fn(a, b):
        return wb.functional.clip_loss(a, b[:3] if wrong else b, 3.0, group=wb.comm.LocalCommunicator())

    with pytest.raises(ValueError, match="image_features and text_features must have the same shape"):
        wb.GradCache([model, model], 2, loss_fn, deferred=deferred)(x, y)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("deferred", [False, True])
def test_a_mistake_in_a_loss_of_other_ranks_raises_on_all(deferred):
    run_ranks(local_loss_body, 2, deferred, timeout_s=60)


@pytest.mark.parametrize("second", [False, True])
def test_the_gradients_of_two_losses_are_restored_if_one_is_refused(second):
    (x, y), models = batch(4), [mlp(0), mlp(1)]
    losses_of = [Clip(), Clip()]
    one, two = (wb.GradCache([m, m], 2, loss, deferred=True)(x, y) for m, loss in zip(models, losses_of, strict=True))
    with torch.no_grad():
        models[second][0].bias.add_(1)
    with pytest.raises(ValueError, match="has been changed since the forward pass"):
        (one + two).backward()
    assert all(p.grad is None for module in (*models, *losses_of) for p in module.parameters())


def other_way_body():
    """Each manner of calling a model is checked, not only the first one."""
    model = DistributedDataParallel(mlp(0))
    x, _ = batch(4)
    for _ in range(2):
        wb.gradcache.encode(model, x, 2).sum().backward()
    with pytest.raises(ValueError, match="must reach its parameters through the DistributedDataParallel"):
        wb.gradcache.encode(model.module, x, 2)


def test_a_later_call_that_bypasses_the_engine_is_refused():
    run_ranks(other_way_body, 2, timeout_s=60)


class Bypass(torch.autograd.Function):
    """Uses a parameter without giving it a gradient."""

    @staticmethod
    def forward(_ctx, x, _p):
        return x.clone()

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


@pytest.mark.parametrize("deferred", [False, True])
def test_a_parameter_without_a_gradient(deferred):
    model, unused, (x, y) = mlp(0), nn.Parameter(torch.zeros(1, dtype=torch.float64)), batch(4)

    def encode(z):
        return Bypass.apply(model(z), unused)

    good_loss(encode(x), encode(y)).backward()
    true = gradients_of(model)
    loss = wb.GradCache([encode, encode], 2, good_loss, deferred=deferred)(x, y)
    if deferred:
        loss.backward()
    assert_all_same(gradients_of(model), true)
    assert unused.grad is None


def test_an_encoder_of_chunks_inside_an_encoder():
    inner, outer, (x, y) = mlp(0), nn.Linear(OUT, OUT).double(), batch(8)
    good_loss(outer(inner(x)), outer(inner(y))).backward()
    true = gradients_of(inner, outer)
    for keep in (0, 1.0):
        a, b = (
            wb.gradcache.encode(lambda z: outer(wb.gradcache.encode(inner, z, 2)), z, 4, keep_graphs=keep)
            for z in (x, y)
        )
        good_loss(a, b).backward()
        assert_all_same(gradients_of(inner, outer), true)


@pytest.mark.parametrize("form", ["immediate", "deferred", "encode"])
def test_a_parameter_that_is_a_representation_is_restored_after_an_error(form):
    model, scale, calls = mlp(0), nn.Parameter(torch.tensor(2.0, dtype=torch.float64)), [0]
    x, y = batch(4)

    def drifts(z):
        calls[0] += 1
        return model(z) * (1.0 if calls[0] < 4 else 1.01)

    def loss_of(a, b):
        return good_loss(a[0], b) * a[1]

    def step():
        if form == "encode":
            r = wb.gradcache.encode(lambda z: (drifts(z), scale), x, 2)
            (r[0].sum() * r[1]).backward()
        else:
            loss = wb.GradCache([lambda z: (model(z), scale), drifts], 2, loss_of, deferred=form == "deferred")(x, y)
            loss.backward()

    with pytest.raises(RuntimeError, match="gave another representation"):
        step()
    assert scale.grad is None
    assert all(p.grad is None for p in model.parameters())


class WithCounter(nn.Module):
    """A model with a buffer, of a shape that no other tensor has, which each pass changes."""

    def __init__(self):
        super().__init__()
        self.net = mlp(0)
        self.register_buffer("calls", torch.zeros(37))

    def forward(self, x):
        self.calls += 1
        return self.net(x)


def test_losses_that_have_gone_backward_hold_no_buffers():
    model, kept, (x, y) = WithCounter(), [], batch(4)
    cache = wb.GradCache([model, model], 2, good_loss, deferred=True)
    gc.unfreeze()  # objects that something has frozen are not listed

    def alike():
        gc.collect()
        tensors = [z for z in gc.get_objects() if type(z) is torch.Tensor and not z.is_nested]
        return sum(z.shape == (37,) for z in tensors)

    before = alike()
    for _ in range(3):
        kept.append(cache(x, y))
        kept[-1].backward(retain_graph=True)
    assert alike() == before
    assert model.calls[0] == 3 * 4


def test_modules_that_another_thread_calls_are_not_the_models():
    """The hook that observes calls is one for the whole process."""
    model, other, (x, y) = mlp(0), nn.BatchNorm1d(D).double(), batch(4)
    waits, goes_on = threading.Event(), threading.Event()

    def encode(z):
        if not waits.is_set():
            waits.set()
            goes_on.wait(30)
        return model(z)

    def train():
        waits.wait(30)
        other(x)
        goes_on.set()

    thread = threading.Thread(target=train)
    thread.start()
    wb.GradCache([encode, model], 2, good_loss)(x, y)
    thread.join()
    assert int(other.num_batches_tracked) == 1
