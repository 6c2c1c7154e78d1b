"""Python's calls in a step of gradient caching, beside those of ten plain lines, on one process."""

import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import wholebatch as wb


class Tower(nn.Module):
    """A transformer of 12 layers, from tokens (b, n) to unit features (b, d)."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)

    def forward(self, tokens):
        return normalize(self.layers(self.embedding(tokens)).mean(1), dim=1)


def loss_fn(x, y):
    return wb.functional.clip_loss(x, y, logit_scale=20.0)


def plain_step(towers, batches, chunk_size):
    chunks = [x.split(chunk_size) for x in batches]
    with torch.no_grad():
        features = [
            torch.cat([tower(x) for x in of]).requires_grad_() for tower, of in zip(towers, chunks, strict=True)
        ]
    loss_fn(*features).backward()
    for tower, of, whole in zip(towers, chunks, features, strict=True):
        for x, grad in zip(of, whole.grad.split(chunk_size), strict=True):
            tower(x).backward(grad)


def calls_of(step):
    """Return how many functions of Python a step calls."""
    calls = 0

    def count(_frame, event, _arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def tokens(rows):
    return torch.randint(1, 100, (rows, 4))


class Activation:
    """An activation function that calls a module."""

    def __init__(self):
        self.norm = nn.BatchNorm1d(32)

    def __call__(self, x):
        return self.norm(x.flatten(0, 1)).relu().view(x.shape)


@pytest.mark.parametrize("caller", ["activation", "hook"])
def test_modules_that_layers_of_torch_call_for_the_caller_are_found(caller):
    """Running averages of a module that only a function or a hook of a layer calls, in later chunks, count once."""
    torch.manual_seed(0)
    x, norms = torch.randn(6, 4, 16), []
    for cached in (True, False):
        torch.manual_seed(1)
        activation, calls = Activation(), []

        def later(z, activation=activation, calls=calls):
            calls.append(z)
            return activation(z) if len(calls) % 3 != 1 else z.relu()

        layer = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, activation=later if caller == "activation" else nn.functional.relu
        )
        if caller == "hook":
            layer.linear1.register_forward_hook(lambda _module, _inputs, z, later=later: later(z))
        tower = (
            nn.TransformerEncoder(layer, 1, enable_nested_tensor=False) if caller == "hook" else nn.Sequential(layer)
        )
        if cached:
            wb.GradCache([tower], 2, lambda reps: reps.square().sum())(x)
        else:
            torch.cat([tower(chunk) for chunk in x.split(2)]).square().sum().backward()
        norms.append(activation.norm)
    one, other = norms
    assert one.num_batches_tracked == other.num_batches_tracked == 2
    torch.testing.assert_close(one.running_mean, other.running_mean)
    torch.testing.assert_close(one.weight.grad, other.weight.grad)


def test_an_error_inside_a_layer_leaves_no_hook():
    tower, calls = nn.Sequential(nn.Sequential(nn.Linear(4, 3))), []

    def encode(x):
        calls.append(x)
        return tower(x[:, : 4 if len(calls) < 3 else 2])

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        wb.GradCache([encode], 2, lambda reps: reps.square().sum())(torch.randn(8, 4))
    for module in tower.modules():
        assert not module._forward_hooks
    assert not nn.modules.module._global_forward_pre_hooks


def test_calls_of_a_step_are_bounded_by_those_of_plain_lines():
    towers, batches = [Tower(), Tower()], [tokens(32), tokens(32)]
    step = wb.GradCache(towers, 2, loss_fn)
    step(*batches)
    gradients = [p.grad.clone() for tower in towers for p in tower.parameters()]
    for tower in towers:
        tower.zero_grad()
    plain_step(towers, batches, 2)
    for p, grad in zip((p for tower in towers for p in tower.parameters()), gradients, strict=True):
        torch.testing.assert_close(p.grad, grad)
    ours, plain = calls_of(lambda: step(*batches)), calls_of(lambda: plain_step(towers, batches, 2))
    assert ours <= 1.25 * plain, f"{ours} calls, plain lines {plain}"
