"""Python's calls in a step of gradient caching, beside those of ten plain lines, on one process."""

import sys

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
    assert ours <= 1.55 * plain, f"{ours} calls, plain lines {plain}"
