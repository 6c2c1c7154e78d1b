"""The kernels' results in plain PyTorch and float64: what every launch of a self-check is compared with.

Each function takes the arguments of the launcher of the same name, and returns by name what that writes:

    truth    the result
    size     the sum of the absolute values of its terms, in which its error is measured

Where results are places of entries, `found_maxima` reads them: they are right if the entries are.

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

Expected: TypeAlias = dict[str, tuple[Tensor, Tensor]]  # truth and size, by name

_NEGATIVES, _ALL, _POSITIVES = range(3)  # candidates


def tile_sums(tile: TileInputs, *, rows: Collection[str], cols: Collection[str]) -> Expected:
    """Return the sums of rows and columns."""
    shift = _numbers(tile)[1]
    logits, among, candidates = _entries(tile)
    exponentials = torch.where(candidates, (logits - shift).exp(), 0.0)
    terms = {
        "sum": exponentials,
        "target": torch.where(among, logits, 0.0),
        "logits": torch.where(candidates, logits, 0.0),
        "count": candidates.double(),
    }
    if tile.positive.named is None and not tile.positive.ids:
        del terms["target"]
    return {
        f"{side}: {name}": (terms[name].sum(dim), terms[name].abs().sum(dim))
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
    logits, among, candidates = _entries(tile)
    exponentials = (logits - _numbers(tile)[1]).exp()
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
    truth, size = sum(parts, nothing), sum((part.abs() for part in parts), nothing)
    found = {"sums of rows of dS": (truth.sum(1), size.sum(1))} if totals else {}
    factors = torch.ones_like(logits[:, :1])
    if tile.row_terms is not None:
        factors = tile.row_terms.scales.double()[:, None]
        if tile.col_scales is not None:
            factors = factors * tile.col_scales.double()
    return {"dS": (truth * factors, size * factors.abs()), **found}


def tile_sigmoid(tile: TileInputs, out: Tensor | None, *, weights: Tensor | None, totals: bool) -> Expected:
    """Return the losses of rows, dS and the sums of its rows."""
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    logits = _products(tile) + _numbers(tile)[1]
    if tile.candidates == _NEGATIVES:
        excluded |= among
    opposed = torch.where(among, -logits, logits).masked_fill(excluded, float("-inf"))
    losses = torch.nn.functional.softplus(opposed)
    grad = torch.where(among, -1.0, 1.0) * opposed.sigmoid()
    if weights is not None:
        grad = grad * weights.double()[:, None]
    found = {"losses of rows": (losses.sum(1), losses.sum(1))}
    if totals:
        found["sums of rows of dS"] = grad.sum(1), grad.abs().sum(1)
    return found if out is None else found | {"dS": (grad, grad.abs())}


def nested_sums(tile: NestedTile, *, cols: bool) -> Expected:
    """Return the sums of rows, the logits of positives, and the sums of columns, of each part."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, of) for of in (tile.features.positive, tile.features.excluded))
    made: dict[str, list[Tensor]] = {"rows: sum": [], "rows: target": [], "columns: sum": []}
    sizes: list[Tensor] = []
    for logits, _ in _parts(tile):
        exponentials = (logits - shift).exp().masked_fill(among | excluded, 0.0)
        targets = torch.where(among, logits, 0.0)
        made["rows: sum"].append(exponentials.sum(1))
        made["rows: target"].append(targets.sum(1))
        sizes.append(targets.abs().sum(1))
        made["columns: sum"].append(exponentials.sum(0))
    stacked = {name: torch.stack(of) for name, of in made.items()}
    found = {name: (of, of) for name, of in stacked.items() if cols or name != "columns: sum"}
    return found | {"rows: target": (stacked["rows: target"], torch.stack(sizes))}


def nested_gradient(tile: NestedTile, out: Tensor, weights: NestedWeights, *, totals_of_cols: bool) -> Expected:
    """Return H of each part, and the sums of dS S."""
    shift = _numbers(tile.features)[1]
    among, excluded = (_members(tile.features, of) for of in (tile.features.positive, tile.features.excluded))
    grads, products = [], []
    for part, (logits, factors) in enumerate(_parts(tile)):
        by_entry = weights.rows[part].double()[:, None]
        if weights.cols is not None:
            by_entry = by_entry + weights.cols[part].double()
        grad = ((logits - shift).exp() * by_entry).masked_fill(excluded, 0.0)
        grad = torch.where(among, weights.targets[part].double()[:, None], grad)
        grads.append(grad * factors)
        products.append(grad * logits)
    summed, sizes = (torch.stack(of).flip(0).cumsum(0).flip(0) for of in (grads, [grad.abs() for grad in grads]))
    each = torch.stack(products)
    found = {"dS": (summed, sizes.amax(0).expand_as(sizes)), "rows: dS S": (each.sum(2), each.abs().sum(2))}
    return found | ({"columns: dS S": (each.sum(1), each.abs().sum(1))} if totals_of_cols else {})


def token_maxima(tile: TokenTile, out: Tensor, winners: Tensor | None) -> Expected:
    """Return the maxima, and the winners among whole numbers, whose products are exact, so that equal ones tie."""
    best, sizes, places = [], [], []
    for products, size in _documents(tile):
        of_best = products.max(1)  # the first of equal ones
        best.append(of_best.values)
        sizes.append(size.amax(1))
        places.append(of_best.indices.double())
    truth, size = torch.stack(best, 1), torch.stack(sizes, 1)
    found = {"maxima": (truth, size)}
    if winners is None:
        return found
    exact = torch.stack(places, 1).masked_fill(~_exact(tile), 0.0)
    return found | {"products of winners": (truth, size), "winners": (exact, torch.zeros_like(exact))}


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
    """Yield the products of all query tokens with each document's tokens, and the sizes of their terms."""
    x, y = tile.features.x.double(), tile.features.y.double()
    for of in y.split(tile.starts.diff().tolist()):
        yield x @ of.T, x.abs() @ of.abs().T


def _exact(tile: TokenTile) -> Tensor:
    """Return whether a query token and all tokens of a document consist of whole numbers, (R, documents)."""
    of_rows, of_tokens = ((z == z.round()).all(1) for z in (tile.features.x, tile.features.y))
    of_documents = torch.stack([of.all() for of in of_tokens.split(tile.starts.diff().tolist())])
    return of_rows[:, None] & of_documents


def _parts(tile: NestedTile) -> list[tuple[Tensor, Tensor]]:
    """Return the logits of each part, and the factors of its products."""
    x, y = tile.features.x.double(), tile.features.y.double()
    found = []
    for part, stop in enumerate((tile.ends.at * tile.ends.unit).tolist()):
        factors = tile.row_scales[part].double()[:, None] * tile.col_scales[part].double()
        found.append((x[:, :stop] @ y[:, :stop].T * factors, factors))
    return found


def _numbers(tile: TileInputs) -> Tensor:
    """Return the scale of S, and its shift or bias."""
    assert tile.numbers is not None
    return tile.numbers.double() * math.log(2)


def _products(tile: TileInputs) -> Tensor:
    return _numbers(tile)[0] * (tile.x.double() @ tile.y.double().T)


def _entries(tile: TileInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logits, and masks of the positives and of the candidates."""
    logits = _products(tile)
    if tile.row_terms is not None:
        logits = logits * tile.row_terms.scales.double()[:, None]
        if tile.col_scales is not None:
            logits = logits * tile.col_scales.double()
        if tile.row_terms.offsets is not None:
            logits = logits + tile.row_terms.offsets.double()[:, None]
    among, excluded = _members(tile, tile.positive), _members(tile, tile.excluded)
    candidates = {_NEGATIVES: ~excluded & ~among, _ALL: ~excluded | among, _POSITIVES: among}[tile.candidates]
    return logits, among, candidates


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
