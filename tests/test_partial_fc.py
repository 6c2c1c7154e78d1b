"""Softmax over class shards: the loss and every gradient are those of the dense twin, on any number of ranks."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compare import assert_same

import wholebatch as wb
from wholebatch.partition import Partition
from wholebatch.testing import run_ranks

D, CLASSES, IGNORED = 6, 11, -100
MARGINS = {
    "ArcFace": wb.ArcFace(20.0, 0.5),
    "ArcFace, linear": wb.ArcFace(20.0, 0.5, fold="linear"),
    "ArcFace, none": wb.ArcFace(20.0, 0.5, fold="none"),
    "CosFace": wb.CosFace(20.0, 0.3),
    "SphereFace": wb.SphereFace(20.0, 1.7),
    "NormFace": wb.NormFace(20.0),
    "combined": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2),
    "combined, clip": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2, fold="clip"),
    "AdaFace": wb.AdaFace(20.0).eval(),
    "MagFace": wb.MagFace(20.0, norms=(1.0, 9.0)),
}
SPLITS = [((7,), (11,)), ((4, 3), (6, 5)), ((5, 0, 2), (1, 7, 3)), ((1, 3, 2, 1), (3, 3, 3, 2)), ((0, 1), (11, 0))]


def data(rows, classes=CLASSES, dtype=torch.float64):
    """Some embeddings lie along their centres, opposite, or at the fold of ArcFace's margin; one has no label."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, D, dtype=dtype, generator=generator)
    x = 3 * torch.randn(rows, D, dtype=dtype, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    for row, angle in enumerate((0.0, math.pi, math.pi - 0.5)[: rows - 1]):
        w = centres[labels[row]]
        across = F.normalize(x[row] - w * (x[row] @ w) / (w @ w), dim=0)
        x[row] = (
            2 * w
            if angle == 0.0
            else -w
            if angle == math.pi
            else w * math.cos(angle) + w.norm() * across * math.sin(angle)
        )
    if rows > 4:
        labels[4] = IGNORED
    return x, labels, centres


def dense(x, labels, centres, **options):
    """The twin's loss and gradients."""
    x, centres = x.clone().requires_grad_(), centres.clone().requires_grad_()
    loss = wb.reference.partial_fc_loss(x, labels, centres, **options)
    loss.sum().backward()
    return loss.detach(), x.grad, centres.grad


def sharded(rows, classes, x, labels, centres, **options):
    """The same of this rank's part."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, centres = x[own].clone().requires_grad_(), centres[held].clone().requires_grad_()
    loss = wb.functional.partial_fc_loss(x, labels[own], centres, **options)
    loss.sum().backward()
    return loss.detach(), x.grad, centres.grad


def exact_body(rows, classes):
    rank, world = dist.get_rank(), dist.get_world_size()
    own, held = Partition(rows).rows(rank), Partition(classes).rows(rank)
    x, labels, centres = data(sum(rows))
    weights = torch.rand(sum(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for name, margin in MARGINS.items():
        for options in ({}, {"margin_grad": "straight_through"}, {"label_smoothing": 0.2}, {"reduction": "sum"}):
            true = dense(x, labels, centres, margin=margin, **options)
            found = sharded(rows, classes, x, labels, centres, margin=margin, sync="sum", **options)
            assert_same(found[0], true[0], relative=1e-12, what=name)
            assert_same(found[1], true[1][own], relative=0, absolute=1e-10 * true[1].abs().max().item())
            assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    margin = MARGINS["ArcFace"]
    true = dense(x, labels, centres, margin=margin, weights=weights)
    for memory in ("flat", 2**12, 2**20):
        found = sharded(rows, classes, x, labels, centres, margin=margin, weights=weights[own], memory=memory)
        assert_same(found[0], true[0], relative=1e-12)
        assert_same(
            found[1], world * true[1][own], relative=0, absolute=1e-10 * world * true[1].abs().max().item()
        )  # what DDP averages
        assert_same(found[2], true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())
    true = dense(x, labels, centres, margin=margin, reduction="none")
    found = sharded(rows, classes, x, labels, centres, margin=margin, reduction="none")
    assert_same(found[0], true[0][own], relative=1e-12)
    assert_same(found[1], true[1][own], relative=0, absolute=1e-10 * true[1].abs().max().item())
    assert_same(found[2] * world, true[2][held], relative=0, absolute=1e-10 * true[2].abs().max().item())


@pytest.mark.parametrize(("rows", "classes"), SPLITS, ids=str)
def test_the_loss_and_all_gradients_are_the_dense_twins(rows, classes):
    run_ranks(exact_body, len(rows), rows, classes, timeout_s=90)
