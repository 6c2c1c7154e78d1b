"""Declared losses that take the softmax sweep, each with a batch for it."""

from functools import partial

import torch
from pair_losses import Batch
from torch.nn.functional import logsigmoid, softplus

import wholebatch as wb


def score(s, x, y, p):
    return p.scale * s


def shifted(s, x, y, p):
    return p.scale * s + 2 * p.scale


def other(x, y):
    return x.index != y.index


def same(x, y):
    return x.label == y.label


def different(x, y):
    return x.label != y.label


def others_of_class(x, y):
    return same(x, y) & other(x, y)


def clip(relative=False, **options):
    def rows(s, x, y, p):
        return p.scale * (s - x.partner)

    def cols(s, x, y, p):
        return p.scale * (s - y.partner)

    if relative:
        terms = {"rows": wb.terms.LogSumExp(rows, other), "cols": wb.terms.LogSumExp(cols, other)}
        losses = (lambda r, x, p: softplus(r.rows)), (lambda r, y, p: softplus(r.cols))
    else:
        terms = {"all": wb.terms.LogSumExp(score), "own": wb.terms.Partner(score)}
        losses = (lambda r, x, p: r.all - r.own), (lambda r, y, p: r.all - r.own)
    return wb.PairLoss(terms, losses[0], column_loss=losses[1], **options)


def clip_over_negatives(**options):
    terms = {"negatives": wb.terms.LogSumExp(score, other), "own": wb.terms.Partner(score)}

    def loss(r, x, p):
        return softplus(r.negatives - r.own, threshold=40)

    return wb.PairLoss(terms, loss, column_loss=loss, **options)


def sup_con(symmetric=True, **options):
    terms = {
        "all": wb.terms.LogSumExp(score, other),
        "mean": wb.terms.Mean(score, others_of_class),
        "count": wb.terms.Count(others_of_class),
    }

    def loss(r, x, p):
        some = r.count > 0
        return torch.where(some, r.all - r.mean, 0.0), some.double()

    return wb.PairLoss(terms, loss, similarity="cosine", symmetric=symmetric, **options)


def classes(**options):
    """Two towers of different lengths, with labels of both: negatives, and a sum and a mean over positives."""
    terms = {
        "negatives": wb.terms.LogSumExp(shifted, different),
        "sum": wb.terms.Sum(shifted, same),
        "mean": wb.terms.Mean(shifted, same),
        "n": wb.terms.Count(same),
        "m": wb.terms.Count(different),
    }

    def loss(r, x, p):
        return r.negatives.clamp(min=-50).tanh() + 0.1 * r.sum - r.mean.sin() + 0.3 * r.n * r.m

    return wb.PairLoss(terms, loss, column_loss=loss, **options)


def smoothed(**options):
    """Sums over the candidates themselves, and the diagonal of matrices that are not square."""
    terms = {
        "all": wb.terms.LogSumExp(score, other),
        "sum": wb.terms.Sum(score, other),
        "mean": wb.terms.Mean(score, other),
        "n": wb.terms.Count(other),
        "own": wb.terms.Count(lambda x, y: x.index == y.index),
    }

    def loss(r, x, p):
        return r.all.clamp(min=-9) * (1 + r.own) - 0.3 * r.mean + (0.1 * r.sum).sin() * r.n

    return wb.PairLoss(terms, loss, column_loss=loss, **options)


def logit(s, x, y, p):
    return p.scale * s - 2 * p.scale


def siglip(**options):
    terms = {
        "all": wb.terms.Sum(lambda s, x, y, p: softplus(logit(s, x, y, p), threshold=40)),
        "own": wb.terms.Partner(logit),
    }
    return wb.PairLoss(terms, lambda r, x, p: r.all - r.own, **options)


def sigmoid_means(**options):
    """Weights and slopes of rows, and another way to write softplus, of rows among themselves."""
    terms = {
        "mean": wb.terms.Mean(lambda s, x, y, p: -logsigmoid(-logit(s, x, y, p)), different),
        "n": wb.terms.Count(different),
    }

    def loss(r, x, p):
        return r.mean * (1 + r.n) / p.scale - x.label, (2.5 + x.label.double()) * p.scale

    return wb.PairLoss(terms, loss, similarity="cosine", **options)


def sigmoid_squared(symmetric=True, **options):
    """A row loss that is no sum of terms: the gradient needs another pass."""
    terms = {"sum": wb.terms.Sum(lambda s, x, y, p: softplus(-logit(s, x, y, p), threshold=40), other)}
    return wb.PairLoss(terms, lambda r, x, p: r.sum * r.sum, similarity="cosine", symmetric=symmetric, **options)


def own_candidates(**options):
    return wb.PairLoss(
        {"all": wb.terms.LogSumExp(score, over="both"), "own": wb.terms.Partner(score)},
        lambda r, x, p: r.all - r.own,
        **options,
    )


def batch_of(name, rows):
    g = torch.Generator().manual_seed(len(name))

    def features(n, *more):
        return torch.randn(n, *more, 5, generator=g, dtype=torch.float64).requires_grad_()

    def labels(n):
        return {"label": torch.randint(0, 3, (n,), generator=g) - 1}

    parameters = {"scale": torch.tensor(1.7, dtype=torch.float64, requires_grad=True)}
    if name.startswith(("sup_con", "multi", "sigmoid")):
        return Batch(features(rows), x_data=labels(rows), parameters=parameters)
    if name in ("classes", "smoothed"):
        cols = rows + 2
        return Batch(features(rows), features(cols), x_data=labels(rows), y_data=labels(cols), parameters=parameters)
    batch = Batch(features(rows), features(rows), parameters=parameters)
    if name == "own":
        batch.candidates = features(rows, 2)
    return batch


LOSSES = {
    "clip": clip,
    "clip over negatives": clip_over_negatives,
    "clip relative": partial(clip, relative=True),
    "sup_con": sup_con,
    "sup_con not declared symmetric": partial(sup_con, symmetric=False),
    "classes": classes,
    "smoothed": smoothed,
    "own": own_candidates,
    "siglip": siglip,
    "sigmoid means": sigmoid_means,
    "sigmoid squared": sigmoid_squared,
}


def multi_similarity(**options):
    """Two passes over S: kernels compute both, plain PyTorch takes tiles of any terms."""
    terms = {
        "positives": wb.terms.LogSumExp(lambda s, x, y, p: -2 * s, others_of_class),
        "negatives": wb.terms.LogSumExp(lambda s, x, y, p: p.scale * s, different),
    }

    def loss(r, x, p):
        return softplus(r.positives + 1) / 2 + softplus(r.negatives - 25) / p.scale

    return wb.PairLoss(terms, loss, similarity="cosine", **options)
