"""Gradient caching costs what its passes cost: Python's calls beside those of ten plain lines, on one process."""

import sys

import pytest
import torch
from torch import nn
from torch.nn.functional import normalize

import wholebatch as wb


class Tower(nn.Module):
    """A transformer of 12 layers, from tokens (b, n) to unit features (b, d); `outside` are modules it does not own."""

    def __init__(self, outside=()):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        self.outside, self.calls = tuple(outside), 0

    def forward(self, tokens):
        self.calls += 1
        x = self.layers(self.embedding(tokens)).mean(1)
        return normalize(self.outside[0](x) if self.outside and tokens[0, 0] == 0 else x, dim=1)


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


def test_a_step_makes_hardly_more_calls_than_plain_lines():
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


@pytest.mark.parametrize("keep_graphs", [0, 3])
def test_a_module_that_is_not_registered_and_first_called_in_a_later_chunk_is_a_mistake(keep_graphs):
    """Later chunks are not observed if the first has called nothing outside: an engine there would go on reducing."""
    x = tokens(6)
    x[4, 0] = 0
    outside = nn.Linear(16, 16)
    tower, plain = Tower([outside]), Tower()
    step = wb.GradCache([tower, plain], 2, loss_fn, keep_graphs=keep_graphs)
    with pytest.raises(ValueError, match=r"model 0 \(Tower\) must register the modules that it calls, and its chunk 2"):
        step(x, tokens(6))
    assert all(p.grad is None for p in [*tower.parameters(), *plain.parameters(), *outside.parameters()])
    tower.registered = outside
    step(x, tokens(6))
    assert outside.weight.grad is not None


def test_buffers_that_the_first_call_registers_are_set_back():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x):
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(()))
            self.seen.add_(len(x))
            return self.linear(x)

    towers = Late(), Late()
    wb.GradCache(towers, 2, loss_fn)(torch.randn(6, 3), torch.randn(6, 3))
    assert [tower.seen.item() for tower in towers] == [6, 6], "each row once"
