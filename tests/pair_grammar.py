"""Declarations drawn from a grammar: terms, masks, data with and without gradient, parameters, sides, similarities.

`drawn(seed)` returns a declaration and a batch for it. Batches have rows of zeros, rows that occur twice, long and
short rows, and labels that leave some rows without candidates.
"""

from __future__ import annotations

import random

import torch
from pair_losses import Batch

import wholebatch as wb

SIMILARITIES = (
    "dot",
    "cosine",
    "neg_squared_distance",
    {"a": "dot", "b": "neg_squared_distance"},
    {"a": "cosine", "b": "dot"},
)


def first(s):
    return s.a if hasattr(s, "a") else s


def second(s):
    return s.b if hasattr(s, "b") else s


SCORES = (
    lambda s, x, y, p: p.scale * first(s),
    lambda s, x, y, p: first(s) * second(s) + y.bias,
    lambda s, x, y, p: (first(s) - x.bias).tanh() * p.scale,
    lambda s, x, y, p: second(s) / (1 + x.temperature**2),
    lambda s, x, y, p: p.table[x.label] * second(s) + p.table[y.label],
    lambda s, x, y, p: (first(s).detach() + 0.5).clamp(min=0) * first(s),
    lambda s, x, y, p: (1.5 - second(s).tanh()).log() * x.bias,
    lambda s, x, y, p: x.bias * y.bias,
    lambda s, x, y, p: torch.where(x.label == 0, p.scale * first(s), second(s) - y.bias),
)
PARTNER_SCORES = (
    lambda s, x, y, p: p.scale * (first(s) - first(x.partner)),
    lambda s, x, y, p: (second(s) - second(y.partner)).tanh(),
)
MASKS = (
    None,
    lambda x, y: x.label == y.label,
    lambda x, y: (x.label != y.label) & (x.index != y.index),
    lambda x, y: x.index < y.index,
    lambda x, y: (x.label == 0) | (y.label == 1),
    lambda x, y: x.label == 7,  # nobody
    lambda x, y, s: first(s) > 0.1,
    lambda x, y, s: (second(s) > -1) & (x.label != y.label),
    lambda x, y: y.keep,
)
KINDS = (
    wb.terms.LogSumExp,
    wb.terms.LogSumExp,
    wb.terms.Sum,
    wb.terms.Mean,
    wb.terms.Max,
    wb.terms.Min,
    wb.terms.Count,
)


def finite(x):
    return torch.where(x.isinf(), 0.0, x)


def drawn(seed, rows, similarity=None):
    """Return the arguments of a PairLoss, and a batch; with "max_sim" rows are texts, and no two of them are equal."""
    pick = random.Random(seed)
    similarity = similarity or pick.choice(SIMILARITIES)
    late = similarity == "max_sim"
    partners = pick.random() < 0.5
    alone = pick.random() < 0.3 and not late  # the rows of x are the columns
    scores = [*SCORES, *PARTNER_SCORES] if partners else [*SCORES]
    terms = {}
    for number in range(pick.randint(1, 4)):
        kind, mask = pick.choice(KINDS), pick.choice(MASKS)
        if kind is wb.terms.Count:
            terms[f"t{number}"] = wb.terms.Count(mask)
        elif kind is wb.terms.Mean and pick.random() < 0.5:
            terms[f"t{number}"] = wb.terms.Mean(pick.choice(scores), mask, log_weight=pick.choice(scores))
        else:
            ties = {"ties": "split"} if late and kind in (wb.terms.Max, wb.terms.Min) else {}
            terms[f"t{number}"] = kind(pick.choice(scores), mask, **ties)
    if partners and pick.random() < 0.5:
        terms["partner"] = wb.terms.Partner(pick.choice(scores))
    names = [*terms]
    on_rows = pick.sample(names, pick.randint(1, len(names)))
    on_cols = pick.sample(names, pick.randint(1, len(names))) if pick.random() < 0.5 else []
    weighted = pick.random() < 0.3
    for name in [name for name in names if name not in on_rows and name not in on_cols]:
        del terms[name]

    def row_loss(r, x, p):
        loss = sum((number + 1) * finite(r[name]) for number, name in enumerate(on_rows)) + p.scale * x.bias
        return (loss, x.bias.abs()) if weighted else loss

    def column_loss(r, y, p):
        return sum(finite(r[name]) * (0.5 + y.bias) for name in on_cols)

    declaration = {"terms": terms, "row_loss": row_loss, "column_loss": column_loss if on_cols else None}
    declaration["similarity"] = similarity
    return declaration, batch_of(pick, similarity, rows, alone)


def batch_of(pick, similarity, rows, alone):
    made = torch.Generator().manual_seed(pick.randrange(2**31))

    def features(count):
        shape = (count, 3, 4) if similarity == "max_sim" else (count, 4)
        x = torch.randn(shape, generator=made, dtype=torch.float64)
        for row in range(count):
            x[row] *= pick.choice((1, 1, 1, 1e-3, 3, 0))
            if row and similarity != "max_sim" and pick.random() < 0.2:
                x[row] = x[row - 1]
        return x.requires_grad_()

    def tower(count):
        return features(count) if isinstance(similarity, str) else {name: features(count) for name in similarity}

    def data(count):
        return {
            "label": torch.randint(0, 3, (count,), generator=made),
            "keep": torch.rand(count, generator=made) < 0.7,
            "bias": torch.randn(count, generator=made, dtype=torch.float64).requires_grad_(pick.random() < 0.6),
            "temperature": torch.rand(count, generator=made, dtype=torch.float64).requires_grad_(pick.random() < 0.6),
        }

    parameters = {
        "scale": torch.tensor(pick.choice([1.7, [1.7]]), dtype=torch.float64).requires_grad_(pick.random() < 0.7),
        "table": torch.randn(3, generator=made, dtype=torch.float64).requires_grad_(pick.random() < 0.7),
    }
    if alone:
        return Batch(tower(rows), None, data(rows), parameters=parameters)
    return Batch(tower(rows), tower(rows), data(rows), data(rows), parameters=parameters)
