"""Precision of constants, a scale of 0, gradients of zeros, and inputs that the reference refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import normalize

import wholebatch as wb
from wholebatch.heads import Targets
from wholebatch.heads.margins.angular import angular


def features(*seeds):
    return [
        normalize(torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)), dim=1)
        for seed in seeds
    ]


def test_the_linear_fold_is_that_of_float64():
    angles = torch.tensor([[3.0], [1.0]], dtype=torch.float64)
    found = angular(Targets(angles, torch.ones(2, 1, dtype=torch.float64)), 1.0, 0.5, "linear")
    assert found[0].item() == pytest.approx(math.cos(3.0) - 0.5 * math.sin(0.5), abs=1e-15)
    assert found[1].item() == pytest.approx(math.cos(1.5), abs=1e-15)
    assert abs(0.5 * torch.as_tensor(0.5).sin().item() - 0.5 * math.sin(0.5)) > 1e-9  # in float32


@pytest.mark.parametrize("directions", [("query_to_key",), ("query_to_key", "key_to_query", "query_to_query")])
def test_info_nce_is_exact_at_a_scale_of_zero(directions):
    gradients = []
    for functions in (wb.functional, wb.reference):
        leaves = [z.requires_grad_() for z in features(0, 1, 2)]
        scale = torch.zeros((), dtype=torch.float64, requires_grad=True)
        loss = functions.info_nce_loss(*leaves[:2], logit_scale=scale, negatives=leaves[2], directions=directions)
        gradients.append([loss, *torch.autograd.grad(loss, [*leaves, scale])])
    for ours, true in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, true, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("exclude_above", [None, 0.1])
def test_negatives_that_no_direction_uses_get_zeros(exclude_above):
    queries, keys, negatives = (z.requires_grad_() for z in features(0, 1, 2))
    wb.functional.info_nce_loss(
        queries,
        keys,
        logit_scale=5.0,
        negatives=negatives,
        directions=("key_to_query",),
        exclude_above=exclude_above,
    ).backward()
    assert negatives.grad is not None
    assert not negatives.grad.any()


def test_gradients_of_weights_in_half_precision_are_exact():
    """A weight's gradients from the sum and from the divisor nearly cancel."""
    x, y = (z.half() for z in features(0, 1))
    weights = 0.1 + torch.rand(5, generator=torch.Generator().manual_seed(2))
    weights = weights.half()
    found = []
    for functions, cast in ((wb.functional, torch.float16), (wb.reference, torch.float64)):
        of = weights.clone().to(cast).requires_grad_()
        functions.clip_loss((1e-2 * x).to(cast), y.to(cast), 1.0, weights=of).backward()
        found.append(of.grad.double())
    assert (found[0] - found[1]).norm() < 2e-3 * found[1].norm()


def test_dcl_is_exact_with_sharp_weights():
    x, y = features(0, 1)
    for functions in (wb.functional, wb.reference):
        loss = functions.dcl_loss(x, -x + 1e-3 * y, sigma=1e-3)
        assert loss.isfinite()
    torch.testing.assert_close(wb.functional.dcl_loss(x, -x + 1e-3 * y, sigma=1e-3), loss, rtol=1e-9, atol=0)


def test_the_reference_splits_the_gradient_of_huge_equal_logits():
    """A logsumexp of 1e18 has lost its logarithm, but the derivative by each of two equal logits is still a half."""
    x = torch.tensor([[1e9, 0.0], [0.0, 1e9]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[1e9, 0.0], [1e9, 0.0]], dtype=torch.float64)
    for functions in (wb.functional, wb.reference):
        (grad,) = torch.autograd.grad(functions.info_nce_loss(x, y, logit_scale=1.0).sum(), x)
        assert grad.abs().max() == 0


REFUSED = {
    "clip_loss": lambda f, x: f.clip_loss(x, x[:3], 1.0),
    "siglip_loss": lambda f, x: f.siglip_loss(x, x[:, :3], 1.0, 0.0),
    "nt_xent_loss": lambda f, x: f.nt_xent_loss(x, x[:3]),
    "info_nce_loss": lambda f, x: f.info_nce_loss(x, x[:3], logit_scale=1.0),
    "sup_con_loss": lambda f, x: f.sup_con_loss(x, torch.arange(3)),
    "moco_loss": lambda f, x: f.moco_loss(x, x, x[:, :3], logit_scale=1.0),
    "vicreg_loss": lambda f, x: f.vicreg_loss(x, x[0]),
    "triplet_loss": lambda f, x: f.triplet_loss([[1.0]], torch.arange(1)),
    "matryoshka_loss": lambda f, x: f.matryoshka_loss(x, x, logit_scale=1.0, dims=(2,), weights=torch.ones(2)),
    "partial_fc_loss": lambda f, x: f.partial_fc_loss(x, torch.zeros(5).long(), x[:, :3], margin=wb.ArcFace()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_reference_checks_shapes(name):
    with pytest.raises((TypeError, ValueError), match=r"must have|must be"):
        REFUSED[name](wb.reference, features(0)[0])
