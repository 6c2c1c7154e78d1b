"""Several deferred steps in one backward pass: of other groups, with other switches, kept graphs, and errors."""

import copy

import pytest
import torch
import torch.distributed as dist
from gradcache_models import assert_all_same, batch, good_loss, gradients_of, mlp
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
