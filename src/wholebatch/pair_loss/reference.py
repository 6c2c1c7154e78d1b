"""A declared loss on one dense matrix of all pairs: one process, no tiles, derivatives by autograd.

It shares with the sweep what the user reads (fields, masks, safe values), and computes everything else by itself: the
whole matrix at once, and each reduction by the function of torch that has its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from .entries import PARTNER, Entries
from .fields import fields
from .first_use import losses_and_weights
from .reductions import Count, LogSumExp, Max, Mean, Min, Partner, Sum, Term
from .sweep import INDEX


def dense(
    declaration: Any,  # a Declaration
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    x_data: Mapping[str, Tensor],
    y_data: Mapping[str, Tensor],
    own: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor] | None,
    parameters: Mapping[str, Any],
    weights: Tensor | None,
    reduction: str,
) -> Tensor:
    """Return the loss of the rows given, as if they were the whole batch."""
    kinds = declaration.kinds
    s = {name: _similarities(kind, x[name], y[name]) for name, kind in kinds.items()}
    rows, cols = next(iter(s.values())).shape
    partner = _partners(x_data, y_data, rows, cols)
    x_numbers, y_numbers = dict(x_data), dict(y_data)
    if partner is not None:
        back = torch.empty_like(partner)
        back[partner] = torch.arange(rows, device=partner.device)
        of_rows = {name: _of_pairs(kind, x[name], y[name][partner]) for name, kind in kinds.items()}
        single = "" in of_rows
        for numbers, at in ((x_numbers, slice(None)), (y_numbers, back)):
            numbers[PARTNER] = of_rows[""][at] if single else {name: value[at] for name, value in of_rows.items()}
    x_numbers[INDEX], y_numbers[INDEX] = (torch.arange(n, device=next(iter(s.values())).device) for n in (rows, cols))
    entries = Entries(kinds, s, _unsqueezed(x_numbers, 1), _unsqueezed(y_numbers, 0), parameters)
    losses = []
    for what, function, read, side, dim in (
        ("row_loss", declaration.row_loss, declaration.reads.rows, x_numbers, 1),
        ("column_loss", declaration.column_loss, declaration.reads.cols, y_numbers, 0),
    ):
        if function is None:
            continue
        r = {}
        for name in read:
            term = declaration.terms[name]
            if isinstance(term, Partner):
                assert partner is not None
                at = (torch.arange(rows, device=partner.device), partner)
                value = _all_values(entries, term)[at]
                r[name] = value if dim else value[back]
            else:
                r[name] = _reduced(declaration, term, entries, own, x, x_numbers, dim)
        of_side = {name: fields("s", of) if isinstance(of, Mapping) else of for name, of in side.items()}
        found = function(fields("r", r), fields("x" if dim else "y", of_side), fields("p", parameters))
        losses.append(losses_and_weights(what, found, rows if dim else cols))
    return _total(losses, weights, reduction)


def _similarities(kind: str, x: Tensor, y: Tensor) -> Tensor:
    if kind == "neg_squared_distance":
        return -(x[:, None] - y[None]).square().sum(2)
    if kind == "cosine":
        x, y = normalize(x, dim=1), normalize(y, dim=1)
    return x @ y.T


def _of_pairs(kind: str, x: Tensor, y: Tensor) -> Tensor:
    if kind == "neg_squared_distance":
        return -(x - y).square().sum(1)
    if kind == "cosine":
        x, y = normalize(x, dim=1), normalize(y, dim=1)
    return (x * y).sum(1)


def _partners(x_data: Mapping[str, Tensor], y_data: Mapping[str, Tensor], rows: int, cols: int) -> Tensor | None:
    if "pair" in x_data and "pair" in y_data:
        equal = x_data["pair"][:, None] == y_data["pair"][None]
        return equal.long().argmax(1)
    return torch.arange(rows, device=None) if rows == cols else None


def _unsqueezed(numbers: Mapping[str, Any], dim: int) -> dict[str, Any]:
    return {
        name: fields("s", {of: one.unsqueeze(dim) for of, one in x.items()}) if isinstance(x, Mapping) else x.unsqueeze(dim)
        for name, x in numbers.items()
    }


def _all_values(entries: Entries, term: Term) -> Tensor:
    value = entries.values(term, None).value
    assert value is not None
    return value.expand(entries.shape)


def _reduced(
    declaration: Any,  # a Declaration
    term: Term,
    entries: Entries,
    own: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Tensor] | None,
    x: Mapping[str, Tensor],
    x_numbers: Mapping[str, Any],
    dim: int,
) -> Tensor:
    """Return the reduction of each row (dim 1) or column (dim 0)."""
    groups = list[tuple[Tensor, Tensor, Tensor]]()  # mask, score and log weight of each row's candidates
    if term.over in ("batch", "both"):
        mask, value, log_weight = _whole(entries, term)
        groups = list(zip(*(one if dim else one.T for one in (mask, value, log_weight)), strict=True))
    if term.over in ("own", "both"):
        assert own is not None
        features, numbers, owners = own
        of_rows = []
        for row in range(len(next(iter(x.values())))):
            at = owners == row
            s = {
                name: _of_pairs(kind, x[name][row].expand_as(features[name][at]), features[name][at])[None]
                for name, kind in declaration.kinds.items()
            }
            one = {name: {k: v[row : row + 1] for k, v in n.items()} if isinstance(n, Mapping) else n[row : row + 1] for name, n in x_numbers.items()}
            columns = {**{name: n[at] for name, n in numbers.items()}, INDEX: torch.full_like(owners[at], -1)}
            found = _whole(Entries(declaration.kinds, s, _unsqueezed(one, 1), _unsqueezed(columns, 0), entries.p), term)
            of_rows.append(tuple(part[0] for part in found))
        groups = of_rows if not groups else [
            tuple(torch.cat(parts) for parts in zip(a, b, strict=True)) for a, b in zip(groups, of_rows, strict=True)
        ]
    return torch.stack([_of_row(term, *group) for group in groups]) if groups else entries.x[INDEX][:0, 0].double()


def _whole(entries: Entries, term: Term) -> tuple[Tensor, Tensor, Tensor]:
    like = next(iter(entries.s.values()))
    mask = entries.mask(term)
    values = entries.values(term, mask)
    mask = torch.ones_like(like, dtype=torch.bool) if mask is None else mask.expand(entries.shape)
    value, log_weight = (
        torch.zeros_like(like) if one is None else one.expand(entries.shape) for one in (values.value, values.log_weight)
    )
    return mask, value, log_weight


def _of_row(term: Term, mask: Tensor, value: Tensor, log_weight: Tensor) -> Tensor:
    """Return the reduction of one row's candidates."""
    value, log_weight = value[mask], log_weight[mask]
    if isinstance(term, LogSumExp):
        value = value[~value.isneginf()]
        return value.logsumexp(0) if len(value) else value.new_full((), float("-inf"))
    if isinstance(term, Max | Min):
        none = float("-inf") if isinstance(term, Max) else float("inf")
        value = value[value != none]
        if not len(value):
            return value.new_full((), none)
        return value[value.argmax() if isinstance(term, Max) else value.argmin()]
    if isinstance(term, Count):
        return value.new_full((), len(value))
    if isinstance(term, Sum):
        return value.sum()
    assert isinstance(term, Mean)
    if not len(value):
        return value.new_zeros(())
    return (log_weight.softmax(0) * value).sum() if term.log_weight is not None else value.mean()


def _total(losses: list[list[Tensor]], weights: Tensor | None, reduction: str) -> Tensor:
    sides = []
    for loss, *own_weights in losses:
        each = torch.ones_like(loss) if weights is None else weights.to(loss)
        for one in own_weights:
            each = each * one
        sides.append((each * loss, each))
    if reduction == "none":
        return sum((loss for loss, _ in sides[1:]), start=sides[0][0])
    totals = [
        loss.sum() if reduction == "sum" else loss.sum() / each.sum() if each.sum() > 0 else (loss * 0).sum()
        for loss, each in sides
    ]
    return sum(totals[1:], start=totals[0])
