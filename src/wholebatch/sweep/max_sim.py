"""The driver of late interaction: a row of S is a query of several vectors, a column a document, or vice versa.

    P_tu = q_t . d_u              a product of vectors ("tokens"), 1 unit of multiply-adds
    S_ij = sum_t max_u P_tu       over the tokens t of query i and u of document j

    dQ_t += dS_ij d_w             w = argmax_u P_tu, the winner of token t in document j
    dD_w += dS_ij q_t

Tiles of S are small; their products are what costs time and memory. A tile takes them in parts: some tokens of its
queries by some documents, in one buffer. Only maxima and winners outlive a part; winners, one small integer for each
query token and document, are held until dS of the tile is known. The backward pass finds them again by the same
products, 1 unit, unless the budget has let the forward pass keep them. A gradient then takes 1 / u of a unit.

Of equal products the first token of a document wins, as in `torch.max`. A product of matrices may round those of equal
tokens differently at its edges. So a winner's gradient goes to the first token that equals it, in any tile.

A CPU takes maxima over documents of one length at a time. A GPU would start as many kernels, so there the tokens of a
part's documents are gathered to one length: a document's last token is repeated, which changes no maximum.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..partition import Ragged, Tile
from .copies import first_copies
from .driver import Block, Driver
from .items import Items
from .kept_winners import KeptWinners
from .maxima import finite, maxima
from .products import Factor, Products, transposed
from .token_budget import TOKENS_OF_A_PART, TokenBudget, at_once, integer_for, pads

Documents = Literal["rows", "columns"]  # what documents are in S

_FEW_TOKENS = 4096  # of a part's documents, up to which padding may be most of them


class MaxSimDriver(Driver):
    """Compute tiles of S from tokens.

    Args:
        x: tokens of the local rows, one row's after the other's.
        rows: the local rows.
        columns: the columns of all ranks.
        documents: whether documents are rows or columns.
        budget: the memory of tiles.
        largest: rows and columns of the largest block.
        products: the precision of products.
        winners: whether `products` will follow, so that winners are needed.
        kept: memory for tiles from the forward pass for the backward pass; None: there is none.
    """

    def __init__(
        self,
        x: Tensor,
        rows: Ragged,
        columns: Ragged,
        *,
        documents: Documents,
        budget: TokenBudget,
        largest: tuple[int, int],
        products: Products,
        winners: bool,
        kept: KeptWinners | None = None,
    ) -> None:
        super().__init__(x, 1.0, side=budget.side, largest=largest, products=products)
        self.items, self.columns, self.documents = rows, columns, documents
        self.budget, self.wants_winners, self.kept = budget, winners, kept
        self.longest = max((rows if documents == "rows" else columns).lengths, default=1)
        self.integer = integer_for(self.longest)
        self.pads = pads(x.device)
        self.winners: Tensor | None = None  # of the last tile

    @property
    def adds_once(self) -> bool:
        """Whether `products` rounds each number of a tile's gradients once, so that they may be in half precision."""
        return False

    def factors(self, tile: Tile, block: Block, start: int = 0) -> tuple[Factor, Factor]:
        rows, cols = self.tokens(tile, block, start)
        return self._halves(rows), self._halves(cols)

    def tokens(self, tile: Tile, block: Block, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return the tokens of a tile's rows and columns as they are; those of columns from feature `start` on."""
        first = self.columns.starts[block.cols.start]
        span = self.columns.of(tile.cols)
        cols = block.y[span.start - first : span.stop - first, start : start + self.width]
        return self.x[self.items.of(tile.rows)], cols

    def logits(self, tile: Tile, x: Factor, y: Factor, out: Tensor | None = None) -> Tensor:
        """Return a tile of S, in `out` if there is one, which may be of a wider type."""
        out = self.buffer(tile) if out is None else out
        tokens, documents = self._sides(tile)
        shape = tokens.vectors, len(documents.ragged.lengths)
        room = None if self.kept is None else self.kept.next(tile.shape, self.dtype, shape, self.integer)
        if room is not None and self.wants_winners:
            self.winners = room[1]
            return out.copy_(room[0])
        winners: Tensor | None = None
        if room is not None:
            winners = room[1]
        elif self.wants_winners:
            winners = out.new_empty(shape, dtype=self.integer)
        queries, document_features = (x, y) if self.documents == "columns" else (y, x)
        s = out.zero_() if self.documents == "columns" else out.zero_().T
        self._maxima(queries, document_features, tokens, documents, s, winners)
        if room is not None:
            room[0].copy_(out)
        self.winners = winners
        return out

    def products(
        self,
        grad: Tensor,
        tile: Tile,
        x: Factor,
        y: Factor,
        block: Block,
        u: Tensor | None,
        v: Tensor | None,
        pairs: object = None,
    ) -> None:
        assert pairs is None
        assert self.winners is not None
        tokens, documents = self._sides(tile)
        first = self.columns.starts[block.cols.start]
        span = self.columns.of(tile.cols)
        u = None if u is None else u[self.items.of(tile.rows)]
        v = None if v is None else v[span.start - first : span.stop - first]
        wide_x, wide_y = (self._widened(factor) for factor in (x, y))
        if self.documents == "columns":
            self._scatter(grad, tokens, documents, (wide_x, wide_y), (u, v))
        else:
            self._scatter(grad.T, tokens, documents, (wide_y, wide_x), (v, u))
        self.winners = None

    def _halves(self, x: Tensor) -> Factor:
        """Return tokens as a factor; their number differs from tile to tile, and so they have fresh memory."""
        if not self.precision.rounds(x):
            return (x,)
        parts = [x.new_empty(x.shape, dtype=dtype) for dtype in self.precision.dtypes(x.dtype)]
        return self.precision.split(x.to(self.dtype, copy=True) if len(parts) > 1 else x, parts)

    def _widened(self, factor: Factor) -> Tensor:
        total = factor[0].to(self.dtype)
        for part in factor[1:]:
            total = total + part
        return total

    def _sides(self, tile: Tile) -> tuple[Items, Items]:
        """Return the queries of a tile, and its documents."""
        rows, cols = (
            Items.of(items, part, self.x.device) for items, part in ((self.items, tile.rows), (self.columns, tile.cols))
        )
        return (rows, cols) if self.documents == "columns" else (cols, rows)

    def _maxima(
        self, queries: Factor, vectors: Factor, tokens: Items, documents: Items, s: Tensor, winners: Tensor | None
    ) -> None:
        """Add the maxima of all query tokens to S, (queries, documents), and write down which tokens have won."""
        integers = not self.pads and finite(queries, vectors)
        for part, some in self._parts(tokens.vectors, documents.ragged):
            span, padded = documents.ragged.of(some), self._padded(documents, some)
            left = tuple(factor[part] for factor in queries)
            right = tuple(factor[span] if padded is None else factor[padded.flatten()] for factor in vectors)
            products = self._product_memory(len(left[0]), len(right[0]))
            self.precision.multiply(left, transposed(right), products)
            lengths = groupby(documents.ragged.lengths[some])  # of documents that follow each other
            shapes = [(len([*run]), length) for length, run in lengths] if padded is None else [padded.shape]
            best, place = maxima(products, shapes, places=winners is not None, integers=integers)
            if winners is not None and place is not None:
                winners[part, some] = place if padded is None else torch.minimum(place, documents.lengths[some] - 1)
            tokens.add_sums_(s[:, some], best, part)

    def _padded(self, documents: Items, some: slice) -> Tensor | None:
        """Return the tokens of some documents, (documents, longest), the last one repeated; None: without padding."""
        longest = max(documents.ragged.lengths[some])
        starts = documents.starts[some.start : some.stop + 1, None]
        span = documents.ragged.of(some)
        if not self.pads or longest * (len(starts) - 1) == span.stop - span.start:
            return None
        return torch.minimum(starts[:-1] + torch.arange(longest, device=starts.device), starts[1:] - 1)

    def _parts(self, tokens: int, documents: Ragged) -> Iterator[tuple[slice, slice]]:
        """Yield some tokens of queries, and some documents, whose products fit into the buffer."""
        count, first = len(documents.lengths), 0
        while first < count:
            rows = max(1, min(tokens, TOKENS_OF_A_PART, self.budget.products // documents.lengths[first]))
            last = self._end(documents, first, max(documents.lengths[first], self.budget.products // rows))
            for start in range(0, tokens, rows):
                yield slice(start, min(start + rows, tokens)), slice(first, last)
            first = last

    def _end(self, documents: Ragged, first: int, most: int) -> int:
        """Return where the documents of a part end that have up to `most` tokens; padding is at most half of many."""
        last, longest = first + 1, documents.lengths[first]
        while last < len(documents.lengths):
            longest = max(longest, documents.lengths[last])
            tokens = documents.starts[last + 1] - documents.starts[first]
            width = (last + 1 - first) * longest if self.pads else tokens
            if width > most or width > max(_FEW_TOKENS, 2 * tokens):
                break
            last += 1
        return last

    def _product_memory(self, rows: int, cols: int) -> Tensor:
        if "products" not in self._tiles:
            self._tiles["products"] = self.x.new_empty(self.budget.products, dtype=self.dtype)
        return self._tiles["products"][: rows * cols].view(rows, cols)

    def _scatter(
        self,
        grad: Tensor,
        tokens: Items,
        documents: Items,
        features: tuple[Tensor, Tensor],
        into: tuple[Tensor | None, Tensor | None],
    ) -> None:
        """Add the gradients of tokens of queries and of documents, from dS, (queries, documents)."""
        assert self.winners is not None
        owners, count = tokens.owners, len(documents.ragged.lengths)
        first_copy = None if into[1] is None else first_copies(features[1], documents)
        some, step = at_once(tokens.vectors, count, self.longest, self.width, self.budget.products, self.x.device)
        for first in range(0, tokens.vectors, some):
            part = slice(first, min(first + some, tokens.vectors))
            for start in range(0, count, step):
                few = slice(start, min(start + step, count))
                span, starts = documents.ragged.of(few), documents.starts[few]
                index = self.winners[part, few].long().add_(starts - span.start)
                if first_copy is not None:
                    index = (first_copy[span] - span.start)[index]
                weights = grad[:, few].index_select(0, owners[part])
                if into[0] is not None:
                    into[0][part].add_(embedding_bag(index, features[1][span], per_sample_weights=weights, mode="sum"))
                if into[1] is not None:
                    _add_at_(into[1][span], index, weights, features[0][part])


def _add_at_(into: Tensor, index: Tensor, weights: Tensor, x: Tensor) -> None:
    """Add weights_tj x_t to the rows of `into` that `index`, (t, j), names: in a fixed order, also on a GPU."""
    sorted_index, order = index.flatten().sort(stable=True)
    starts = torch.searchsorted(sorted_index, torch.arange(len(into), device=sorted_index.device))
    x_index = order.div(index.shape[1], rounding_mode="floor")
    into += embedding_bag(x_index, x, starts, per_sample_weights=weights.flatten()[order], mode="sum")
