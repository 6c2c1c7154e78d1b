"""Declared losses, each with a batch for it; tests compare them with losses of the library and with references."""

from dataclasses import dataclass, field
from typing import Any

import torch
from declared import clip, different, same, siglip, sup_con
from torch.nn.functional import softplus

import wholebatch as wb


@dataclass
class Batch:
    """The global batch: rows and columns with their data, split over ranks by numbers of rows."""

    x: Any
    y: Any = None
    x_data: dict = field(default_factory=dict)
    y_data: dict = field(default_factory=dict)
    candidates: Any = None
    candidate_data: dict = field(default_factory=dict)
    parameters: dict = field(default_factory=dict)
    weights: Any = None


def leaves(batch):
    """Return all tensors with a gradient, by name."""
    found = {}
    for name, value in vars(batch).items():
        for key, one in value.items() if isinstance(value, dict) else [("", value)]:
            if isinstance(one, torch.Tensor) and one.requires_grad:
                found[f"{name} {key}"] = one
    return found


def part(batch, rows, cols):
    """Return a rank's part of a batch, as new leaves; parameters are copies."""

    def of(value, at):
        if isinstance(value, dict):
            return {key: of(one, at) for key, one in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        cut = value.detach()[at].clone() if at is not None else value.detach().clone()
        return cut.requires_grad_(value.requires_grad)

    at = {
        "x": rows,
        "x_data": rows,
        "candidates": rows,
        "candidate_data": rows,
        "weights": rows,
        "y": cols,
        "y_data": cols,
        "parameters": None,
    }
    return Batch(**{name: of(value, at[name]) for name, value in vars(batch).items()})


def cut(counts, rank):
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def call(function, batch):
    given = dict(vars(batch))
    return function(given.pop("x"), given.pop("y"), **given)


def gradients(function, batch):
    """Return value and gradients by name."""
    tensors = leaves(batch)
    for x in tensors.values():
        x.grad = None
    loss = call(function, batch)
    if loss.requires_grad:
        loss.backward()
    return loss.detach(), {
        name: torch.zeros_like(x) if x.grad is None else x.grad.clone() for name, x in tensors.items()
    }


# Further declarations beside those of `declared`: learned data and parameters, both sides, own candidates.


def multi_similarity(**options):
    return wb.PairLoss(
        {
            "positives": wb.terms.LogSumExp(lambda s, x, y, p: -p.alpha * (s - p.base), where=same),
            "negatives": wb.terms.LogSumExp(lambda s, x, y, p: p.beta * (s - p.base), where=different),
        },
        lambda r, x, p: softplus(r.positives) / p.alpha + softplus(r.negatives) / p.beta,
        similarity="cosine",
        **options,
    )


def hard_triplet(**options):
    def loss(r, x, p):
        complete = ~(r.far.isinf() | r.near.isinf())
        far, near = (torch.where(complete, -one, 1.0).sqrt() for one in (r.far, r.near))
        return torch.relu(far - near + p.margin), complete.double()

    return wb.PairLoss(
        {"far": wb.terms.Min(where=same), "near": wb.terms.Max(where=different)},
        loss,
        similarity="neg_squared_distance",
        **options,
    )


def weighted_mean(**options):
    return wb.PairLoss(
        {
            "mean": wb.terms.Mean(lambda s, x, y, p: s * y.bias, log_weight=lambda s, x, y, p: p.scale * s + x.partner),
            "count": wb.terms.Count(where=lambda x, y, s: s > 0),
            "sum": wb.terms.Sum(lambda s, x, y, p: (s * x.bias).tanh(), where=lambda x, y, s: s > 0.5),
            "own": wb.terms.Partner(lambda s, x, y, p: s * y.bias),
            "best": wb.terms.Max(lambda s, x, y, p: s * y.bias + x.bias, where=different),
        },
        lambda r, x, p: (r.mean + r.sum / (1 + r.count) + r.own + r.best.clamp(min=-9), 1 + x.bias**2),
        column_loss=lambda r, y, p: r.mean * y.bias + r.best.clamp(min=-9) + r.count,
        **options,
    )


def own_negatives(**options):
    return wb.PairLoss(
        {
            "all": wb.terms.LogSumExp(
                lambda s, x, y, p: p.scale * s, where=lambda x, y: x.label == y.label, over="both"
            ),
            "best": wb.terms.Max(lambda s, x, y, p: s + y.bias, over="own"),
            "taught": wb.terms.Mean(lambda s, x, y, p: s, log_weight=lambda s, x, y, p: y.bias, over="own"),
        },
        lambda r, x, p: r.all + r.best.clamp(min=-9) + r.taught,
        **options,
    )


DECLARATIONS = {
    of.__name__: of for of in (clip, multi_similarity, hard_triplet, sup_con, siglip, weighted_mean, own_negatives)
}


def batch_for(name, rows, cols, seed=0, dtype=torch.float64):
    """Return a batch for a declaration."""
    made = torch.Generator().manual_seed(seed)

    def numbers(*shape):
        return torch.randn(*shape, generator=made, dtype=dtype).requires_grad_()

    def one(value):
        return torch.tensor(value, dtype=dtype, requires_grad=True)

    def labels(n):
        return torch.randint(0, 3, (n,), generator=made)

    if name == "clip":
        return Batch(numbers(rows, 5), numbers(cols, 5), parameters={"scale": one([3.0])})
    if name == "siglip":
        return Batch(numbers(rows, 5), numbers(cols, 5), parameters={"scale": one(2.0), "bias": one(-1.5)})
    if name == "multi_similarity":
        return Batch(
            numbers(rows, 5),
            x_data={"label": labels(rows)},
            parameters={"alpha": one(2.0), "beta": 50.0, "base": one(0.5)},
        )
    if name == "hard_triplet":
        return Batch(numbers(rows, 5), x_data={"label": labels(rows)}, parameters={"margin": 0.2})
    if name == "sup_con":
        return Batch(numbers(rows, 5), x_data={"label": labels(rows)}, parameters={"scale": 10.0})
    x_data, y_data = {"bias": numbers(rows), "label": labels(rows)}, {"bias": numbers(cols), "label": labels(cols)}
    if name == "own_negatives":
        candidate_data = {"bias": numbers(rows, 3), "label": torch.randint(0, 3, (rows, 3), generator=made)}
        return Batch(
            numbers(rows, 5), numbers(cols, 5), x_data, y_data, numbers(rows, 3, 5), candidate_data, {"scale": one(2.0)}
        )
    weights = torch.rand(rows, generator=made, dtype=dtype).requires_grad_() if rows == cols else None
    if rows != cols or name == "weighted_mean":
        pairs = torch.randperm(rows, generator=made)
        x_data["pair"], y_data["pair"] = pairs, pairs[torch.randperm(rows, generator=made)]
    return Batch(numbers(rows, 5), numbers(cols, 5), x_data, y_data, parameters={"scale": one(1.5)}, weights=weights)
