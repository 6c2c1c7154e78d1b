"""Margins have the papers' formulas, and the loss never falls when the target's angle grows."""

import math

import pytest
import torch
from compare import assert_same
from partial_fc_data import MARGINS, data, dense

import wholebatch as wb
from wholebatch.heads import Targets, margins


def test_margins_equal_the_papers_formulas():
    """Compare with the formulas by acos, away from its ends."""
    theta = torch.linspace(0.2, 2.2, 50, dtype=torch.float64)
    norms = torch.linspace(5.0, 130.0, 50, dtype=torch.float64)
    theta, norms = theta[:, None], norms[:, None]
    targets, c = Targets(theta, norms), theta.cos()
    assert_same(wb.ArcFace(m=0.5)(targets), (c.acos() + 0.5).cos(), relative=1e-12)
    assert_same(wb.CosFace(m=0.4)(targets), c - 0.4, relative=1e-12)
    assert_same(wb.SphereFace(m=1.3)(targets), (1.3 * c.acos()).cos(), relative=1e-12)
    combined = wb.CombinedMargin(64.0, 1.2, 0.3, 0.1)
    assert_same(combined(targets), (1.2 * c.acos() + 0.3).cos() - 0.1, relative=1e-12)
    a = norms.clamp(10, 110)
    assert_same(wb.MagFace()(targets), (theta + 0.35 / 100 * (a - 10) + 0.45).cos(), relative=1e-12)
    ada = wb.AdaFace()
    ada.observe_norms(norms)
    mean, std = 0.99 * 20 + 0.01 * norms.clamp(max=100).mean(), 0.99 * 100 + 0.01 * norms.clamp(max=100).std()
    u = ((norms.clamp(max=100) - mean) / (std + 1e-3) * 0.333).clamp(-1, 1)
    assert_same(ada(targets), (theta - 0.4 * u).clamp(0, math.pi).cos() - 0.4 * u - 0.4, relative=1e-12)
    assert_same(ada.mean, mean, relative=1e-12)
    curricular = wb.CurricularFace(10.0, 0.5)
    curricular.observe_angles(theta)
    assert_same(curricular.t, 0.01 * c.mean(), relative=1e-12)
    negatives = torch.linspace(-1, 1, 50, dtype=torch.float64).expand(50, 50).T.contiguous()
    bent = curricular.of_negatives(theta).transform_(10 * negatives, slice(0, 50)) / 10
    hard = negatives > (theta[:, 0] + 0.5).cos()
    assert hard.any()
    assert not hard.all()
    assert_same(bent, torch.where(hard, negatives * (0.01 * c.mean() + negatives), negatives), relative=1e-12)
    transform = curricular.of_negatives(theta)
    cosines = negatives.clone().requires_grad_()
    torch.where(hard, cosines * (curricular.t + cosines), cosines).sum().backward()
    assert_same(transform.slope_(10 * negatives, slice(0, 50)), cosines.grad, relative=1e-12)
    assert 10 * bent.abs().max() <= transform.bound(10.0)


@pytest.mark.parametrize("margin", [wb.ArcFace(m=0.5), wb.SphereFace(m=3.3), wb.CombinedMargin(64.0, 2.0, 0.5, 0.1)])
def test_a_larger_angle_is_never_rewarded(margin):
    """The target's logit falls with the angle, beyond pi, too, where the plain cosine would rise."""
    theta = torch.linspace(0, math.pi, 2000, dtype=torch.float64)[:, None]
    change = margin(Targets(theta, theta)).diff(dim=0)
    assert (change <= 1e-12).all()
    assert change.abs().max() < 0.01, "without a jump"
    plain = wb.CombinedMargin(64.0, margin.m1, margin.m2, margin.m3, fold="none")
    assert (plain(Targets(theta, theta)).diff(dim=0) > 1e-6).any()


def test_the_straight_through_gradient_differs_from_the_exact_one():
    """Insightface's code differs from the exact gradient by the factor sin(theta + m) / sin(theta) at the target."""
    x, labels, centers = data(6)
    exact, through = (
        dense(x, labels, centers, margin=wb.ArcFace(), margin_grad=g) for g in ("exact", "straight_through")
    )
    assert_same(exact[0], through[0], relative=1e-15)
    assert (exact[2] - through[2]).norm() > 0.05 * exact[2].norm()


def test_the_table_of_exactness_has_every_shipped_margin():
    tested = {type(margin).__name__ for margin in MARGINS.values()}
    assert tested == set(margins.__all__)
