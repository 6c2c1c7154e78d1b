"""The dense reference equals a case computed by hand, and its definition in plain loops."""

import math

import pytest
import torch
from compare import assert_same

import wholebatch as wb


def test_two_pairs_match_a_computation_by_hand():
    # S = [[2, 0], [0, 2]]: every row and column has loss log(1 + exp(-2)).
    x = torch.eye(2, dtype=torch.float64)
    assert wb.reference.clip_loss(x, x, 2.0).item() == pytest.approx(math.log1p(math.exp(-2)), rel=1e-15)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_the_reference_equals_its_definition_in_loops(label_smoothing):
    x, y = torch.randn(2, 5, 3, dtype=torch.float64)
    scale, bias, n = 3.0, -2.0, 5
    total = 0.0
    for a, b in ((x, y), (y, x)):
        for i in range(n):
            logits = [scale * float(a[i] @ b[j]) + bias for j in range(n)]
            log_normalizer = math.log(sum(math.exp(logit) for logit in logits))
            for j in range(n):
                target = (1 - label_smoothing) * (i == j) + label_smoothing / n
                total -= target * (logits[j] - log_normalizer)
    loss = wb.reference.clip_loss(x, y, scale, logit_bias=bias, label_smoothing=label_smoothing)
    assert_same(loss, torch.tensor(total / (2 * n)), relative=1e-7)


def test_the_reference_passes_gradcheck():
    x, y = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(wb.reference.clip_loss, (x.detach().requires_grad_(), y.detach(), scale))
