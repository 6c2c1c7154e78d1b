"""The kernels' results in plain PyTorch and float64: what every launch of a self-check is compared with.

Each function takes the arguments of the launcher of the same name, and returns by name what that writes:

    truth    the result
    error    the error that a right kernel may make before it rounds the result to its dtype

Where results are places of entries, `found_maxima` reads them: they are right if the entries are.

A sum of d products of random features can nearly cancel. So its error is relative to sum_k |x_k y_k|, not to the sum,
and an error of a logit changes its exponential by that factor. These errors are allowed for:

    products    Those of bfloat16 and float16 are exact in float32. float32 is split into parts of 11 bits, perhaps
                truncated: one part of each factor for TF32 (2^-9), else two, without the product of the small ones and
                with what is left of these (3 x 2^-20). The errors of d products of random signs largely cancel: of
                their sum a share of 4 / sqrt(d) may remain, for five standard deviations.
    sums        Tensor cores add 4 products or more at a time to the sum so far, and truncate it to 24 bits, by 2^-23.
                Of random signs, the sum so far stays below 8 / sqrt(d) of sum_k |x_k y_k|: also five standard
                deviations. d / 4 such errors make sqrt(d) 2^-22, three times that for the three products of float32.
    the rest    `_SINGLE`, 16 roundings of float32: exp2 (4), scales, weights, and the sum of a block's entries

It is written from the formulas in `tiles`, with a mask for each set of entries, and shares no code with the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from .launch import Entries, TileInputs
from .nested import NestedTile, NestedWeights
from .tokens import TokenTile

Expected: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # truth and error, by name

_SINGLE = 2.0**-20  # relative to the terms of a result
_NEGATIVES, _ALL, _POSITIVES = range(3)  # candidates


def tile_sums(tile: TileInputs, *, rows: Collection[str], cols: Collection[str]) -> Expected:
    """Return the sums of rows and columns."""
    logits, errors, among, candidates = _entries(tile)
    exponentials = _exponentials(logits, errors, _numbers(tile)[1])
    terms = {
        "sum": (*exponentials, candidates),
        "target": (logits, errors, among),
        "logits": (logits, errors, candidates),
        "count": (torch.ones_like(logits), torch.zeros_like(logits), candidates),
    }
    if tile.positive.named is None and not tile.positive.ids:
        del terms["target"]
    masked = {name: [of.where(mask, 0.0) for of in pair] for name, (*pair, mask) in terms.items()}
    return {
        f"{side}: {name}": (masked[name][0].sum(dim), masked[name][1].sum(dim))
        for side, names, dim in (("rows", rows, 1), ("columns", cols, 0))
        for name in names
        if name in terms
    }


def tile_gradient(
    tile: TileInputs,
    out: Tensor,
    *,
    rows: Mapping[str, Tensor],
    cols: Mapping[str, Tensor],
    totals: bool = False,
) -> Expected:
    """Return dS, and the sums of its rows before they are scaled."""
    logits, errors, among, candidates = _entries(tile)
    exponentials, errors = _exponentials(logits, errors, _numbers(tile)[1])
    weights = {
        name: sum(side[name].double().unsqueeze(dim) for side, dim in ((rows, 1), (cols, 0)) if name in side)
        for name in {*rows, *cols}
    }
    parts = [torch.where(candidates, exponentials * weights["sum"], 0.0)] if weights else []
    if "logits" in weights:
        parts.append(torch.where(candidates, weights["logits"], 0.0))
    if "target" in weights:
        parts.append(torch.where(among, weights["target"], 0.0))
    nothing = torch.zeros_like(logits)
    truth, error = sum(parts, nothing), _SINGLE * sum((part.abs() for part in parts), nothing)
    if weights:
        error = error + torch.where(candidates, errors * torch.as_tensor(weights["sum"]).abs(), 0.0)
    found = {"sums of rows of dS": (truth.sum(1), error.sum(1))} if totals else {}
    factors = torch.ones_like(logits[:, :1])
    if tile.row_terms is not None:
        factors = tile.row_terms.scales.double()[:, None]
        if tile.col_scales is not None:
            factors = factors * tile.col_scales.double()
    return {"dS": (truth * factors, error * factors.abs()), **found}


def tile_sigmoid(tile: TileInputs, out: Tensor | None, *, weights: Tensor | None, totals: bool) -> Expected:
    """Return the losses of rows, dS and the sums of its rows."""
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    products, errors = _products(tile, len(tile.x.T))
    scale, bias = _numbers(tile)
    logits, errors = scale * products + bias, abs(scale) * errors + _SINGLE * abs(bias)
    if tile.candidates == _NEGATIVES:
        excluded |= among
    opposed = torch.where(among, -logits, logits).masked_fill(excluded, float("-inf"))
    losses, chances = torch.nn.functional.softplus(opposed), opposed.sigmoid()
    errors = chances * errors.expm1()  # at least that of a loss, and of a chance
    of_losses, of_grad = _SINGLE * losses + errors, _SINGLE * chances + errors
    grad = torch.where(among, -chances, chances)
    if weights is not None:
        grad, of_grad = (z * weights.double()[:, None] for z in (grad, of_grad))
    found = {"losses of rows": (losses.sum(1), of_losses.sum(1))}
    if totals:
        found["sums of rows of dS"] = grad.sum(1), of_grad.sum(1)
    return found if out is None else found | {"dS": (grad, of_grad)}


def nested_sums(tile: NestedTile, *, cols: bool) -> Expected:
    """Return the sums of rows, the logits of positives, and the sums of columns, of each part."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, of) for of in (tile.features.positive, tile.features.excluded))
    sums: list[Expected] = []
    for logits, errors, _ in _parts(tile):
        exponentials = [of.masked_fill(among | excluded, 0.0) for of in _exponentials(logits, errors, shift)]
        targets = [of.where(among, 0.0) for of in (logits, errors)]
        sums.append({
            "rows: sum": (exponentials[0].sum(1), exponentials[1].sum(1)),
            "rows: target": (targets[0].sum(1), targets[1].sum(1)),
            **({"columns: sum": (exponentials[0].sum(0), exponentials[1].sum(0))} if cols else {}),
        })  # fmt: skip
    return {name: _stacked([of[name] for of in sums]) for name in sums[0]}


def nested_gradient(tile: NestedTile, out: Tensor, weights: NestedWeights, *, totals_of_cols: bool) -> Expected:
    """Return H of each part, and the sums of dS S."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, of) for of in (tile.features.positive, tile.features.excluded))
    grads, of_rows, of_cols = [], [], []
    for part, (logits, of_logits, factors) in enumerate(_parts(tile)):
        by_entry = weights.rows[part].double()[:, None]
        if weights.cols is not None:
            by_entry = by_entry + weights.cols[part].double()
        exponentials, errors = _exponentials(logits, of_logits, shift)
        grad = (exponentials * by_entry).masked_fill(excluded, 0.0)
        grad = torch.where(among, weights.targets[part].double()[:, None], grad)
        error = (errors * by_entry.abs()).masked_fill(among | excluded, 0.0) + _SINGLE * grad.abs()
        grads.append((grad * factors, error * factors.abs()))
        product, of_product = grad * logits, error * logits.abs() + grad.abs() * of_logits
        of_rows.append((product.sum(1), of_product.sum(1)))
        of_cols.append((product.sum(0), of_product.sum(0)))
    each, errors = _stacked(grads)
    summed = each.flip(0).cumsum(0).flip(0)  # by kernels, as the sum of all parts without the earlier ones
    found = {"dS": (summed, errors.sum(0).expand_as(errors)), "rows: dS S": _stacked(of_rows)}
    return found | ({"columns: dS S": _stacked(of_cols)} if totals_of_cols else {})


def token_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> Expected:
    """Return the maxima, and the winners among whole numbers, whose products are exact, so that equal ones tie."""
    best, largest, places = [], [], []
    for products, errors in _documents(tile):
        of_best = products.max(1)  # the first of equal ones
        best.append(of_best.values)
        largest.append(errors.amax(1))
        places.append(of_best.indices.double())
    truth, error = torch.stack(best, 1), torch.stack(largest, 1)
    found = {"maxima": (truth, error)}
    if winners is None:
        return found
    exact = torch.stack(places, 1).masked_fill(~_exact(tile), 0.0)  # another's product may be off by as much
    return found | {"products of winners": (truth, 2 * error), "winners": (exact, torch.zeros_like(exact))}


def found_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> dict[str, Tensor]:
    """Return what a kernel has written, by the names of `token_maxima`."""
    found = {"maxima": out}
    if winners is None:
        return found
    places, products = winners.long(), []
    for document, (of_tokens, _) in enumerate(_documents(tile)):
        at = places[:, document, None]
        there = (at >= 0) & (at < of_tokens.shape[1])
        products.append(of_tokens.gather(1, at.where(there, 0)).where(there, float("nan"))[:, 0])
    exact = places.double().masked_fill(~_exact(tile), 0.0)
    return found | {"products of winners": torch.stack(products, 1), "winners": exact}


def _documents(tile: TokenTile) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the products of all query tokens with each document's tokens, and their errors."""
    products, errors = _products(tile.features, len(tile.features.x.T))
    lengths = tile.starts.diff().tolist()
    yield from zip(products.split(lengths, 1), errors.split(lengths, 1), strict=True)


def _exact(tile: TokenTile) -> Tensor:
    """Return whether a query token and all tokens of a document consist of whole numbers, (R, documents)."""
    of_rows, of_tokens = ((z == z.round()).all(1) for z in (tile.features.x, tile.features.y))
    of_documents = torch.stack([of.all() for of in of_tokens.split(tile.starts.diff().tolist())])
    return of_rows[:, None] & of_documents


def _parts(tile: NestedTile) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the logits of each part, their errors, and the factors of its products."""
    found = []
    for part, stop in enumerate((tile.ends.at * tile.ends.unit).tolist()):
        factors = tile.row_scales[part].double()[:, None] * tile.col_scales[part].double()
        products, errors = _products(tile.features, stop)
        found.append((products * factors, errors * factors.abs(), factors))
    return found


def _stacked(of: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    truths, errors = zip(*of, strict=True)
    return torch.stack(truths), torch.stack(errors)


def _numbers(tile: TileInputs) -> tuple[float, float]:
    """Return the scale of S, and its shift or bias."""
    assert tile.numbers is not None
    scale, other = (tile.numbers.double() * math.log(2)).tolist()
    return scale, other


def _products(tile: TileInputs, dim: int) -> tuple[Tensor, Tensor]:
    """Return the products of rows and columns in the first features, and their errors: see the module's docstring."""
    x, y = (z[:, :dim].double() for z in (tile.x, tile.y))
    of_terms, times = 0.0, 1
    if tile.x.dtype == torch.float32:
        of_terms, times = (2.0**-9, 1) if tile.allows_tf32 else (3 * 2.0**-20, 3)
    error = of_terms * min(1.0, 4 / math.sqrt(dim)) + times * math.sqrt(dim) * 2.0**-22 + _SINGLE
    return x @ y.T, error * (x.abs() @ y.abs().T)


def _exponentials(logits: Tensor, errors: Tensor, shift: float) -> tuple[Tensor, Tensor]:
    """Return exp(S - shift) and its errors."""
    exponentials = (logits - shift).exp()
    return exponentials, exponentials * ((errors + _SINGLE * abs(shift)).expm1() + _SINGLE)


def _entries(tile: TileInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the logits and their errors, and masks of the positives and of the candidates."""
    products, errors = _products(tile, len(tile.x.T))
    scale = _numbers(tile)[0]
    logits, errors = scale * products, abs(scale) * errors
    if tile.row_terms is not None:
        scales = tile.row_terms.scales.double()[:, None]
        if tile.col_scales is not None:
            scales = scales * tile.col_scales.double()
        logits, errors = logits * scales, errors * scales.abs()
        if tile.row_terms.offsets is not None:
            offsets = tile.row_terms.offsets.double()[:, None]
            logits, errors = logits + offsets, errors + _SINGLE * offsets.abs()
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    candidates = {_NEGATIVES: ~excluded & ~among, _ALL: ~excluded | among, _POSITIVES: among}[tile.candidates]
    return logits, errors, among, candidates


def _members(tile: TileInputs, of: Entries) -> Tensor:
    """Return a mask of a set of entries, (R, C)."""
    found = torch.zeros(len(tile.x), len(tile.y), dtype=torch.bool, device=tile.x.device)
    rows = torch.arange(len(tile.x), device=tile.x.device)[:, None]
    for named in () if of.named is None else of.named:
        found |= rows == named - tile.first_row
    if not of.ids or of.rows is None or of.cols is None:
        return found
    equal = of.rows[:, None] == of.cols
    return equal | found if of.ids == 1 else equal & ~found
