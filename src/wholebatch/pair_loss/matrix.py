"""Late interaction as one matrix: a node for S, and between S and its gradient plain PyTorch.

    tokens -> S -> scores, masks and the reductions of all rows, or columns -> dS -> gradients of tokens

In late interaction tokens and their products are large, and S is not: it has one number for each pair of a query and a
document. Where all of a rank's S is small beside a tile of products, reductions by autograd start a third of the
operations that tiles need, and the time of a small step is theirs. Reductions are computed in the precision of sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.autograd import no_autocast, once_differentiable
from .._base.precision import wide_dtype
from ..exchange import ColumnData
from ..nodes import Route, Vectors, token_driver
from ..partition import tiles
from ..sweep import Block, default_side
from .reductions import Count, LogSumExp, Max, Mean, Min, Sum, Term
from .row_data import nested
from .similarity import ONE
from .tile import Reduced
from .tile_entries import Entries

_NONE = {LogSumExp: float("-inf"), Max: float("-inf"), Min: float("inf")}  # the score of an entry that is none
_BESIDE_A_TILE = 8  # entries of a tile of products for each entry of S, which has a few copies in float64


def fits(device: torch.device, rows: int, cols: int) -> bool:
    """Return whether S is not empty, and small beside a tile of products."""
    return 0 < rows * cols <= default_side(device) ** 2 // _BESIDE_A_TILE


def is_reduced_by_autograd(term: Term) -> bool:
    """Return whether plain PyTorch has the term's value, and its derivative."""
    simple = isinstance(term, LogSumExp | Sum | Count) or (isinstance(term, Mean) and term.log_weight is None)
    return term.slope is None and (simple or (isinstance(term, Max | Min) and term.ties == "split"))


def reduced_matrix(
    s: Tensor,
    kind: str,
    terms: Sequence[Reduced],
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    parameters: Mapping[str, Any],
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the reductions of rows and of columns of S by name, from the numbers of rows, (b,), and columns, (B,)."""
    of_x, of_y = (nested({n: z.unsqueeze(dim) for n, z in side.items()})[0] for side, dim in ((x, 1), (y, 0)))
    entries = Entries({ONE: kind}, {ONE: s}, of_x, of_y, parameters)
    rows, cols = dict[str, Tensor](), dict[str, Tensor]()
    shared = dict[Any, Tensor | None]()  # scores of this library, which are finite where the mask is not
    for each in terms:
        term, mask = each.term, entries.mask(each.term)
        if term.factor is None:
            score = entries.values(term, mask).value
        else:
            if term.score not in shared:
                shared[term.score] = entries.values(term, None).value
            score = shared[term.score]
        candidates = _candidates(term, mask, score)
        for wanted, into, dim in ((each.rows, rows, 1), (each.cols, cols, 0)):
            if wanted:
                into[each.name] = _reduced(term, s, score, candidates, dim)
    return rows, cols


def _candidates(term: Term, mask: Tensor | None, score: Tensor | None) -> Tensor | None:
    """Return a term's candidates; a user's score may say that an entry is none."""
    if score is None or term.factor is not None or type(term) not in _NONE:
        return mask
    counts = score.detach() != _NONE[type(term)]
    return counts if mask is None else mask & counts


def _reduced(term: Term, s: Tensor, score: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    """Return one reduction of all rows, dim 1, or of all columns, dim 0."""
    if score is None or isinstance(term, Mean):
        number = torch.ones_like(s) if mask is None else mask.expand(s.shape).to(s.dtype)
        number = number.sum(dim)
        if score is None:
            return number
    candidates = score if mask is None else score.masked_fill(~mask, _NONE.get(type(term), 0.0))
    candidates = candidates.expand(s.shape)
    if isinstance(term, LogSumExp):
        return candidates.logsumexp(dim)
    if isinstance(term, Max | Min):
        return candidates.amax(dim) if isinstance(term, Max) else candidates.amin(dim)
    return candidates.sum(dim) if isinstance(term, Sum) else candidates.sum(dim) / number.clamp(min=1)


class TokenMatrix(torch.autograd.Function):
    """Compute S of the local rows and all columns, (b, B), in the precision of sums, from the tokens of both.

    Collective: the exchange of tokens, and of their gradients.
    """

    @staticmethod
    @no_autocast
    def forward(ctx: Any, route: Route, vectors: Vectors, x: Tensor, y: Tensor) -> Tensor:
        exchange, rank = route.exchange, route.comm.rank
        ctx.route, ctx.vectors, ctx.dtypes = route, vectors, (x.dtype, y.dtype)
        x, y = route.products.rounded(x), route.products.rounded(y)
        fetched = exchange.fetch(y)
        keeps = route.budget.kept > 0 and any(ctx.needs_input_grad)
        driver, winners = token_driver(route, x, vectors, winners=keeps), list[Tensor]()
        ctx.starts = driver.starts
        shape = vectors.rows.items.counts[rank], vectors.cols.items.total
        s = x.new_empty(shape, dtype=wide_dtype(x.device))

        def visit(block: Block, columns: ColumnData) -> None:
            for tile in tiles(block.rows, block.cols, driver.side):
                s[tile.rows, tile.cols] = driver.logits(tile, *driver.factors(tile, block))
                if driver.winners is not None:
                    winners.append(driver.winners)

        exchange.accumulate(fetched, visit)
        ctx.save_for_backward(x, y, fetched, *winners)
        return s

    @staticmethod
    @once_differentiable
    @no_autocast
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        route, (x, y, fetched, *winners) = ctx.route, ctx.saved_tensors
        want_x, want_y = ctx.needs_input_grad[2:]
        driver, kept = token_driver(route, x, ctx.vectors, winners=True, starts=ctx.starts), iter(winners)
        one_tile = driver.adds_once and route.comm.size == 1 and max(grad.shape) <= driver.side
        of_x, of_y = ctx.dtypes if one_tile else (driver.dtype, driver.dtype)
        grad, u = grad.to(driver.dtype), torch.zeros_like(x, dtype=of_x) if want_x else None

        def visit(block: Block, columns: ColumnData) -> None:
            for tile in tiles(block.rows, block.cols, driver.side):
                factors = driver.factors(tile, block)
                driver.winners = next(kept, None)
                if driver.winners is None:
                    driver.logits(tile, *factors)  # for its winners
                of_tile = grad[tile.rows, tile.cols].contiguous()
                driver.products(of_tile, tile, *factors, block, u, columns.accumulated)

        initial = x.new_zeros(1, y.shape[1], dtype=of_y) if want_y else None
        v = route.exchange.accumulate(fetched, visit, initial=initial, to_owner=True)
        gradients = (z if z is None else z.to(dtype) for z, dtype in zip((u, v), ctx.dtypes, strict=True))
        return None, None, *gradients
