"""The kernels' results in plain PyTorch and float64: what every launch of a self-check is compared with.

Each function takes the arguments of the launcher of the same name, and returns by name what that writes: the
truth, and the error that a right kernel may make before it rounds a result to its dtype, stacked.
Where results are places of entries, `found_maxima` reads them: they are right if the entries are.

A sum of d products of random features can nearly cancel. So its error is relative to sum_k |x_k y_k|, not to the sum,
and an error of a logit changes its exponential by that factor. These errors are allowed for:

    products    Those of bfloat16 and float16 are exact in float32. float32 is split into parts of 11 bits, perhaps
                truncated: one part of each factor for TF32 (2^-9), else two, without the product of the small ones and
                with what is left of these (3 x 2^-20). The errors of d products of random signs largely cancel: of
                their sum a share of 4 / sqrt(d) may remain, for five standard deviations.
    sums        Tensor cores add 4 products or more at a time to the sum so far, and truncate it to 24 bits: by 2^-24
                on average. Of random signs, the sum so far stays around 4 / sqrt(d) of sum_k |x_k y_k|, or below. d / 4
                such errors make sqrt(d) 2^-24, three times that for the three products of float32.
    the rest    `_SINGLE`, 16 roundings of float32: exp2 (4), scales, weights, and the sum of a block's entries

It is written from the formulas in `tiles`, with a mask for each set of entries, and shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import pairwise
from math import log, sqrt
from typing import TypeAlias

import torch
from torch import Tensor

from .launch import Entries, TileInputs
from .nested import NestedTile, NestedWeights
from .tokens import TokenTile, TokenWeights

Expected: TypeAlias = dict[str, Tensor]  # truth and error, stacked, by name

_SINGLE = 2.0**-20  # relative to the terms of a result
_OF_WEIGHTS = 2.0**-14  # the same, of dS in two numbers of bfloat16, perhaps truncated
_NEGATIVES, _ALL, _POSITIVES = range(3)  # candidates


def tile_sums(tile: TileInputs, *, rows: Collection[str], cols: Collection[str]) -> Expected:
    """Return the sums of rows and columns."""
    logits, among, candidates = _entries(tile)
    exponentials = _exponentials(logits, _numbers(tile)[1]).where(candidates, 0.0)
    terms = {
        "sum": exponentials,
        "target": logits.where(among, 0.0),
        "logits": logits.where(candidates, 0.0),
        "count": torch.stack([candidates.double(), torch.zeros_like(logits[0])]),
    }
    if tile.positive.named is None and not tile.positive.ids:
        del terms["target"]
    return {
        f"{side}: {name}": terms[name].sum(dim)
        for side, names, dim in (("rows", rows, -1), ("columns", cols, -2))
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
    logits, among, candidates = _entries(tile)
    exponentials = _exponentials(logits, _numbers(tile)[1])
    nothing, sides = torch.zeros_like(logits), ((rows, 1), (cols, 0))
    weights = {
        name: sum((side[name].double().unsqueeze(dim) for side, dim in sides if name in side), nothing[0])
        for name in {*rows, *cols}
    }
    parts = [_scaled(exponentials, weights["sum"]).where(candidates, 0.0)] if weights else []
    if "logits" in weights:
        parts.append(_rounded(weights["logits"]).where(candidates, 0.0))
    if "target" in weights:
        parts.append(_rounded(weights["target"]).where(among, 0.0))
    grad = sum(parts, nothing)
    row_sums = {"sums of rows of dS": grad.sum(-1)} if totals else {}
    if tile.row_terms is not None:
        grad = _scaled(grad, tile.row_terms.scales.double()[:, None])
        if tile.col_scales is not None:
            grad = _scaled(grad, tile.col_scales.double()[None])
    return {"dS": grad, **row_sums}


def tile_sigmoid(tile: TileInputs, out: Tensor | None, *, weights: Tensor | None, totals: bool) -> Expected:
    """Return the losses of rows, dS and the sums of its rows."""
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    logits, errors = _products(tile, tile.x.shape[1])
    scale, bias = _numbers(tile)
    logits, errors = scale * logits + bias, abs(scale) * errors + _SINGLE * abs(bias)
    if tile.candidates == _NEGATIVES:
        excluded |= among
    opposed = torch.where(among, -logits, logits).masked_fill(excluded, float("-inf"))
    losses, chances = torch.nn.functional.softplus(opposed), opposed.sigmoid()
    errors = chances * errors.expm1()  # that of a loss, at most, and of its derivative
    losses, grad = (
        torch.stack([x, _SINGLE * x.abs() + errors]) for x in (losses, torch.where(among, -chances, chances))
    )
    if weights is not None:
        grad = _scaled(grad, weights.double()[:, None])
    expected = {"losses of rows": losses.sum(-1)}
    if totals:
        expected["sums of rows of dS"] = grad.sum(-1)
    return expected if out is None else expected | {"dS": grad}


def nested_sums(tile: NestedTile, *, cols: bool) -> Expected:
    """Return the sums of rows, the logits of positives, and the sums of columns, of each part."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, entries) for entries in (tile.features.positive, tile.features.excluded))
    sums: dict[str, list[Tensor]] = {"rows: sum": [], "rows: target": [], "columns: sum": []}
    for logits, _ in _parts(tile):
        exponentials = _exponentials(logits, shift).masked_fill(among | excluded, 0.0)
        sums["rows: sum"].append(exponentials.sum(-1))
        sums["rows: target"].append(logits.where(among, 0.0).sum(-1))
        sums["columns: sum"].append(exponentials.sum(-2))
    return {name: torch.stack(parts, 1) for name, parts in sums.items() if cols or name != "columns: sum"}


def nested_gradient(tile: NestedTile, out: Tensor, weights: NestedWeights, *, totals_of_cols: bool) -> Expected:
    """Return H of each part, and the sums of dS S."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, entries) for entries in (tile.features.positive, tile.features.excluded))
    grads, products = [], []
    for part, (logits, factors) in enumerate(_parts(tile)):
        by_entry = weights.rows[part].double()[:, None]
        if weights.cols is not None:
            by_entry = by_entry + weights.cols[part].double()
        grad = _scaled(_exponentials(logits, shift), by_entry).masked_fill(excluded, 0.0)
        grad = torch.where(among, _rounded(weights.targets[part].double()[:, None]), grad)
        grads.append(_scaled(grad, factors))
        product = _scaled(grad, logits[0])
        product[1] += grad[0].abs() * logits[1]
        products.append(product)
    summed, each = torch.stack(grads, 1).flip(1).cumsum(1).flip(1), torch.stack(products, 1)
    summed[1] = summed[1, 0].clone()  # a kernel subtracts the earlier parts from the sum of all
    expected = {"dS": summed, "rows: dS S": each.sum(-1)}
    return expected | ({"columns: dS S": each.sum(-2)} if totals_of_cols else {})


def token_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> Expected:
    """Return the maxima, and the winners among whole numbers, whose products are exact, so that equal ones tie."""
    best, places = [], []
    for products, errors in _documents(tile):
        maxima = products.max(1)  # the first of equal ones
        best.append(torch.stack([maxima.values, errors.amax(1)]))
        places.append(maxima.indices.double())
    expected = {"maxima": torch.stack(best, 2)}
    if winners is None:
        return expected
    exact = torch.stack(places, 1).masked_fill(~_exact(tile), 0.0)
    truth, error = expected["maxima"]
    expected["products of winners"] = torch.stack([truth, 2 * error])  # that of the best one errs, too
    return expected | {"winners": torch.stack([exact, torch.zeros_like(exact)])}


def token_sums(tile: TokenTile, out: Tensor, best: Tensor, starts: Tensor, first_row: int) -> Expected:
    """Return S with the maxima of some query tokens."""
    ends = (starts - first_row).clamp(0, len(best)).tolist()
    terms = _rounded(best.double())
    sums = torch.stack([terms[:, first:stop].sum(1) for first, stop in pairwise(ends)], 1)
    return {"sums": sums + _rounded(out.double())}


def query_gradient(tile: TokenTile, out: Tensor, weights: TokenWeights) -> Expected:
    """Return the gradients of query tokens."""
    chosen, terms = _chosen(tile, weights)
    each = terms[:, :, None] * tile.features.y.double()[chosen]
    return {"dQ": _rounded(each).sum(2) + _rounded(out.double())}


def document_gradient(tile: TokenTile, out: Tensor, weights: TokenWeights) -> Expected:
    """Return the gradients of document tokens."""
    chosen, terms = _chosen(tile, weights)
    by_token, x = terms.new_zeros(len(out), len(chosen)).scatter_add_(0, chosen.T, terms.T), tile.features.x
    split = _OF_WEIGHTS
    if x.dtype == torch.float32:
        split = 2.0**-9 if tile.features.allows_tf32 else 3 * 2.0**-20
    error = split + sqrt(len(x)) * 2.0**-22 + _SINGLE
    sums = torch.stack([by_token @ x.double(), error * (by_token.abs() @ x.double().abs())])
    return {"dD": sums + _rounded(out.double())}


def _chosen(tile: TokenTile, weights: TokenWeights) -> tuple[Tensor, Tensor]:
    """Return the document tokens that have won, and dS of their documents, for each query token."""
    return weights.winners.long() + tile.starts[:-1], weights.grad.double()[weights.owners.long()]


def found_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> dict[str, Tensor]:
    """Return what a kernel has written, by the names of `token_maxima`."""
    results = {"maxima": out}
    if winners is None:
        return results
    places, products = winners.long(), []
    for document, (document_products, _) in enumerate(_documents(tile)):
        index = places[:, document, None]
        exists = (index >= 0) & (index < document_products.shape[1])
        products.append(document_products.gather(1, index.where(exists, 0)).where(exists, float("nan"))[:, 0])
    exact = places.double().masked_fill(~_exact(tile), 0.0)
    return results | {"products of winners": torch.stack(products, 1), "winners": exact}


def _documents(tile: TokenTile) -> tuple[Tensor, ...]:
    """Return the products of all query tokens with each document's tokens."""
    return _products(tile.features, tile.features.x.shape[1]).split(tile.starts.diff().tolist(), 2)


def _exact(tile: TokenTile) -> Tensor:
    """Return whether a query token and all tokens of a document consist of whole numbers, (R, documents)."""
    exact_rows, exact_tokens = ((z == z.round()).all(1) for z in (tile.features.x, tile.features.y))
    exact_documents = torch.stack([document.all() for document in exact_tokens.split(tile.starts.diff().tolist())])
    return exact_rows[:, None] & exact_documents


def _parts(tile: NestedTile) -> list[tuple[Tensor, Tensor]]:
    """Return the logits of each part, and the factors of its products."""
    parts = []
    for part, stop in enumerate((tile.ends.stops * tile.ends.unit).tolist()):
        factors = tile.row_scales[part].double()[:, None] * tile.col_scales[part].double()
        parts.append((_scaled(_products(tile.features, stop), factors), factors))
    return parts


def _products(tile: TileInputs, dim: int) -> Tensor:
    """Return the products of rows and columns in the first features, and their errors as in the module's docstring."""
    x, y = (z[:, :dim].double() for z in (tile.x, tile.y))
    split, sums = 0.0, 1
    if tile.x.dtype == torch.float32:
        split, sums = (2.0**-9, 1) if tile.allows_tf32 else (3 * 2.0**-20, 3)
    error = split * min(1.0, 4 / sqrt(dim)) + sums * sqrt(dim) * 2.0**-24 + _SINGLE
    return torch.stack([x @ y.T, error * (x.abs() @ y.abs().T)])


def _numbers(tile: TileInputs) -> tuple[float, float]:
    """Return the scale of S, and its shift or bias."""
    assert tile.numbers is not None
    scale, other = (tile.numbers.double() * log(2)).tolist()
    return scale, other


def _rounded(x: Tensor) -> Tensor:
    """Return exact numbers, and the errors of results of which they are terms."""
    return torch.stack([x, _SINGLE * x.abs()])


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Return numbers and their errors times a factor."""
    return x * torch.stack([factor, factor.abs()])


def _exponentials(logits: Tensor, shift: float) -> Tensor:
    """Return exp(S - shift) and its errors."""
    exponentials, errors = (logits[0] - shift).exp(), logits[1] + _SINGLE * abs(shift)
    return torch.stack([exponentials, exponentials * (errors.expm1() + _SINGLE)])


def _entries(tile: TileInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits and their errors, and masks of the positives and of the candidates."""
    logits = _scaled(_products(tile, tile.x.shape[1]), tile.x.new_full((1, 1), _numbers(tile)[0], dtype=torch.float64))
    if tile.row_terms is not None:
        logits = _scaled(logits, tile.row_terms.scales.double()[:, None])
        if tile.col_scales is not None:
            logits = _scaled(logits, tile.col_scales.double()[None])
        if tile.row_terms.offsets is not None:
            logits = logits + _rounded(tile.row_terms.offsets.double()[:, None])
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    candidates = {_NEGATIVES: ~excluded & ~among, _ALL: ~excluded | among, _POSITIVES: among}[tile.candidates]
    return logits, among, candidates


def _members(tile: TileInputs, entries: Entries) -> Tensor:
    """Return a mask of a set of entries, (R, C)."""
    mask = torch.zeros(len(tile.x), len(tile.y), dtype=torch.bool, device=tile.x.device)
    rows = torch.arange(len(tile.x), device=tile.x.device)[:, None]
    for named in () if entries.named is None else entries.named:
        mask |= rows == named - tile.first_row
    if not entries.ids or entries.rows is None or entries.cols is None:
        return mask
    equal = entries.rows[:, None] == entries.cols
    return equal | mask if entries.ids == 1 else equal & ~mask
