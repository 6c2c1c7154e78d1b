"""Data, margins, splits over ranks and training runs for the tests of PartialFC."""

import math

import torch
import torch.nn.functional as F

import wholebatch as wb

D, CLASSES, IGNORED = 6, 11, -100


def curricular():
    margin = wb.CurricularFace(20.0, 0.5).eval()
    margin.t.fill_(0.3)
    return margin


MARGINS = {
    "ArcFace": wb.ArcFace(20.0, 0.5),
    "ArcFace, linear": wb.ArcFace(20.0, 0.5, fold="linear"),
    "ArcFace, none": wb.ArcFace(20.0, 0.5, fold="none"),
    "CosFace": wb.CosFace(20.0, 0.3),
    "SphereFace": wb.SphereFace(20.0, 1.7),
    "NormFace": wb.NormFace(20.0),
    "combined": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2),
    "combined, clip": wb.CombinedMargin(20.0, 1.1, 0.3, 0.2, fold="clip"),
    "CurricularFace": curricular(),
    "AdaFace": wb.AdaFace(20.0).eval(),
    "MagFace": wb.MagFace(20.0, norms=(1.0, 9.0)),
}


SPLITS = [((7,), (11,)), ((4, 3), (6, 5)), ((5, 0, 2), (1, 7, 3)), ((1, 3, 2, 1), (3, 3, 3, 2)), ((0, 1), (11, 0))]


def data(rows, classes=CLASSES, dtype=torch.float64):
    """Return embeddings, some along their centers, opposite or at the fold of ArcFace's margin; one has no label."""
    generator = torch.Generator().manual_seed(0)
    centers = torch.randn(classes, D, dtype=dtype, generator=generator)
    x = 3 * torch.randn(rows, D, dtype=dtype, generator=generator)
    labels = torch.randint(classes, (rows,), generator=generator)
    for row, angle in enumerate((0.0, math.pi, math.pi - 0.5)[: rows - 1]):
        w = centers[labels[row]]
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
    return x, labels, centers


def dense(x, labels, centers, **options):
    """Return the reference's loss and gradients."""
    x, centers = x.clone().requires_grad_(), centers.clone().requires_grad_()
    loss = wb.reference.partial_fc_loss(x, labels, centers, **options)
    loss.sum().backward()
    return loss.detach(), x.grad, centers.grad


def sgd(params):
    return wb.SparseSGD(params, lr=0.5, momentum=0.9, weight_decay=0.01)


def adamw(params):
    return wb.SparseAdamW(params, lr=0.05, weight_decay=0.1)
