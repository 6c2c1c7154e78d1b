"""The driver of late interaction: a row of S is a query of several vectors, a column a document, or vice versa.

    P_tu = q_t . d_u              a product of vectors ("tokens"), 1 unit of multiply-adds
    S_ij = sum_t max_u P_tu       over the tokens t of query i and u of document j

    dQ_t += dS_ij d_w             w = argmax_u P_tu, the winner of token t in document j
    dD_w += dS_ij q_t

Tiles of S are small; their products are what costs time and memory. A tile takes them in parts: some tokens of its
queries by some documents, in one buffer. Only maxima and winners outlive a part; winners, one small integer for each
query token and document, are held until dS of the tile is known. The backward pass finds them again by the same
products, 1 unit, unless the budget has let the forward pass keep them. A gradient then takes 1 / u of a unit.

Of equal products the first token of a document wins, as in `torch.max`. Equal as computed: a product of matrices may
round equal tokens differently at its edges, so that for copies of a token another one may win in another tile. The sum
of their gradients is the same.

A CPU takes maxima over documents of one length at a time. A GPU would start as many kernels, so there the tokens of a
part's documents are gathered to one length: a document's last token is repeated, which changes no maximum.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..partition import Partition, Ragged, Tile
from .driver import Block, Driver
from .memory import Budget, Memory
from .products import Factor, Products, transposed

Documents = Literal["rows", "columns"]  # what documents are in S

_WINNERS_FOR_EACH_PRODUCT = 2  # entries of a tile's winners, for each entry of its buffer of products
_TOKENS_OF_A_PART = 1024  # of queries: with more of them, a part has too few documents
_AT_ONCE, _AT_ONCE_ON_A_GPU = 2**15, 2**20  # winners of which gradients are computed at a time
_FEW_TOKENS = 4096  # of a part's documents, up to which padding may be most of them


@dataclass(frozen=True)
class TokenBudget(Budget):
    """The memory that a sweep over tokens may allocate; `kept` counts bytes of winners and of S.

    Args:
        products: entries of the buffer of products.
    """

    products: int


def pads(device: torch.device) -> bool:
    """Return whether documents of several lengths are padded: many small operations are slow to start on a GPU."""
    return device.type != "cpu"


def at_once(tokens: int, longest: int, width: int, products: int, device: torch.device) -> tuple[int, int]:
    """Return how many of a tile's query tokens, and of its documents, have their gradients computed at a time.

    Their winners are few, and their gradients have no more numbers than the buffer of products.

    Args:
        tokens: of the tile's queries.
        longest: the most tokens of a document.
        width: d.
        products: entries of the buffer of products.
        device: of the tokens.
    """
    winners = min(_AT_ONCE_ON_A_GPU if pads(device) else _AT_ONCE, products)
    some = max(1, min(tokens, _TOKENS_OF_A_PART, products // width))
    return some, max(1, min(winners // some, products // (longest * width)))


def integer_for(longest: int) -> torch.dtype:
    """Return the smallest integer dtype for the place of a token in a document.

    >>> integer_for(256), integer_for(257)
    (torch.uint8, torch.int16)
    """
    return torch.uint8 if longest <= 2**8 else torch.int16 if longest <= 2**15 else torch.int32


def fit_tokens(memory: Memory, *, longest: tuple[int, int], side: int, dtype: torch.dtype, kept: int) -> TokenBudget:
    """Return the budget of one rank.

    Args:
        memory: "auto", "flat", or bytes.
        longest: the most tokens of a query, and of a document.
        side: of a tile whose rows and columns are single vectors; its square is the buffer of products.
        dtype: of products.
        kept: bytes of all winners and entries of S.

    >>> fit_tokens("flat", longest=(32, 180), side=640, dtype=torch.float32, kept=10**9)
    TokenBudget(side=160, kept=0, kept_dtype=torch.uint8, products=409600)
    """
    query, document = max(1, longest[0]), max(1, longest[1])
    products, flat = side * side, bytes_of_flat(longest, side, dtype)
    spare = 0
    if memory == "auto":
        spare = kept if kept <= products * dtype.itemsize else 0
    elif isinstance(memory, int) and memory >= flat:
        spare = min(kept, memory - flat)
    elif isinstance(memory, int):
        products = max(document, products * memory // flat)
    of_tile = max(1, min(side, isqrt(_WINNERS_FOR_EACH_PRODUCT * products // query)))
    return TokenBudget(of_tile, spare, torch.uint8, max(products, document))


def bytes_of_flat(longest: tuple[int, int], side: int, dtype: torch.dtype) -> int:
    """Return the bytes of a buffer of products, of a tile's winners, and of two tiles of S."""
    winners = _WINNERS_FOR_EACH_PRODUCT * side * side
    tiles = 2 * winners // max(1, longest[0])
    return (max(side * side, longest[1]) + tiles) * dtype.itemsize + winners * integer_for(longest[1]).itemsize


def smallest_token_budget(longest_document: int, dtype: torch.dtype) -> int:
    """Return the least bytes: the products of one query token and the longest document, and as much for all else."""
    return 2 * max(1, longest_document) * dtype.itemsize


def bytes_of_winners(tokens: int, documents: int, queries: int, longest: int, dtype: torch.dtype) -> int:
    """Return the bytes of all winners of these query tokens and documents, and of their entries of S."""
    return documents * (tokens * integer_for(longest).itemsize + queries * dtype.itemsize + 16)


class KeptWinners:
    """Entries of S and winners of the first tiles of a sweep, as many as fit into one buffer.

    Args:
        buffer: of bytes.
    """

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._used = 0

    def next(self, tile: tuple[int, int], dtype: torch.dtype, winners: tuple[int, int], integer: torch.dtype) -> _Room:
        """Return the memory of the next tile, in the order of the sweep; None if that tile is not kept."""
        parts = [self._part(shape, of) for shape, of in ((tile, dtype), (winners, integer))]
        return None if parts[0] is None or parts[1] is None else (parts[0], parts[1])

    def _part(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        size = shape[0] * shape[1] * dtype.itemsize
        start, self._used = self._used, self._used + (size + 7) // 8 * 8  # a float64 starts at a multiple of 8
        return self.buffer[start : start + size].view(dtype).view(shape) if start + size <= len(self.buffer) else None


_Room = tuple[Tensor, Tensor] | None


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
        self._starts = {"rows": _numbers(rows.starts, x.device), "cols": _numbers(columns.starts, x.device)}
        self._winners: Tensor | None = None  # of the last tile

    def factors(self, tile: Tile, block: Block, start: int = 0) -> tuple[Factor, Factor]:
        rows, cols = self.tokens(tile, block, start)
        return self._halves(rows), self._halves(cols)

    def tokens(self, tile: Tile, block: Block, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return the tokens of a tile's rows and columns as they are; those of columns from feature `start` on."""
        first = self.columns.starts[block.cols.start]
        at = self.columns.of(tile.cols)
        cols = block.y[at.start - first : at.stop - first, start : start + self.width]
        return self.x[self.items.of(tile.rows)], cols

    def logits(self, tile: Tile, x: Factor, y: Factor) -> Tensor:
        out = self.buffer(tile)
        tokens, documents = self._sides(tile)
        shape = tokens.vectors, len(documents.ragged.lengths)
        room = None if self.kept is None else self.kept.next(tile.shape, self.dtype, shape, self.integer)
        if room is not None and self.wants_winners:
            self._winners = room[1]
            return out.copy_(room[0])
        winners: Tensor | None = None
        if room is not None:
            winners = room[1]
        elif self.wants_winners:
            winners = out.new_empty(shape, dtype=self.integer)
        queries, of_documents = (x, y) if self.documents == "columns" else (y, x)
        s = out if self.documents == "columns" else self.scratch(tile).view(tile.shape[::-1])
        self._maxima(queries, of_documents, tokens, documents, s.zero_(), winners)
        if s is not out:
            out.copy_(s.T)
        if room is not None:
            room[0].copy_(out)
        self._winners = winners
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
        assert self._winners is not None
        tokens, documents = self._sides(tile)
        first = self.columns.starts[block.cols.start]
        at = self.columns.of(tile.cols)
        u = None if u is None else u[self.items.of(tile.rows)]
        v = None if v is None else v[at.start - first : at.stop - first]
        of_rows, of_cols = (self._widened(factor) for factor in (x, y))
        if self.documents == "columns":
            self._scatter(grad, tokens, documents, (of_rows, of_cols), (u, v))
        else:
            self._scatter(grad.T, tokens, documents, (of_cols, of_rows), (v, u))
        self._winners = None

    def _halves(self, x: Tensor) -> Factor:
        """Return tokens as a factor; their number differs from tile to tile, and so they have fresh memory."""
        if not self.precision.rounds(x):
            return (x,)
        parts = [x.new_empty(x.shape, dtype=of) for of in self.precision.dtypes(x.dtype)]
        return self.precision.split(x.to(self.dtype, copy=True) if len(parts) > 1 else x, parts)

    def _widened(self, factor: Factor) -> Tensor:
        total = factor[0].to(self.dtype)
        for part in factor[1:]:
            total = total + part
        return total

    def _sides(self, tile: Tile) -> tuple[Items, Items]:
        """Return the queries of a tile, and its documents."""
        rows, cols = (
            Items.of(all_items, self._starts[name], at)
            for name, all_items, at in (("rows", self.items, tile.rows), ("cols", self.columns, tile.cols))
        )
        return (rows, cols) if self.documents == "columns" else (cols, rows)

    def _maxima(
        self, queries: Factor, of: Factor, tokens: Items, documents: Items, s: Tensor, winners: Tensor | None
    ) -> None:
        """Add the maxima of all query tokens to S, (queries, documents), and write down which tokens have won."""
        for part, some in self._parts(tokens.vectors, documents.ragged):
            at, padded = documents.ragged.of(some), self._padded(documents, some)
            left = tuple(factor[part] for factor in queries)
            right = tuple(factor[at] if padded is None else factor[padded.flatten()] for factor in of)
            found = self._product_memory(len(left[0]), len(right[0]))
            self.precision.multiply(left, transposed(right), found)
            best = found.new_empty(len(found), some.stop - some.start)
            first = 0
            for run, length in _runs(documents.ragged, some) if padded is None else [(some, padded.shape[1])]:
                width = (run.stop - run.start) * length
                scores = found[:, first : first + width].unflatten(1, (-1, length))
                first += width
                into = best[:, run.start - some.start : run.stop - some.start]
                if winners is None:
                    torch.amax(scores, 2, out=into)
                    continue
                largest, place = scores.max(2)
                into.copy_(largest)
                winners[part, run] = place if padded is None else torch.minimum(place, documents.lengths[run] - 1)
            tokens.add_sums_(s[:, some], best, part)

    def _padded(self, documents: Items, some: slice) -> Tensor | None:
        """Return the tokens of some documents, (documents, longest), the last one repeated; None: without padding."""
        longest = max(documents.ragged.lengths[some])
        starts = documents.starts[some.start : some.stop + 1, None]
        at = documents.ragged.of(some)
        if not self.pads or longest * (len(starts) - 1) == at.stop - at.start:
            return None
        return torch.minimum(starts[:-1] + torch.arange(longest, device=starts.device), starts[1:] - 1)

    def _parts(self, tokens: int, documents: Ragged) -> Iterator[tuple[slice, slice]]:
        """Yield some tokens of queries, and some documents, whose products fit into the buffer."""
        count, first = len(documents.lengths), 0
        while first < count:
            rows = max(1, min(tokens, _TOKENS_OF_A_PART, self.budget.products // documents.lengths[first]))
            last = self._end(documents, first, max(documents.lengths[first], self.budget.products // rows))
            for start in range(0, tokens, rows):
                yield slice(start, min(start + rows, tokens)), slice(first, last)
            first = last

    def _end(self, documents: Ragged, first: int, most: int) -> int:
        """Return where the documents of a part end that have up to `most` tokens; padding is at most half of many."""
        last, longest = first + 1, documents.lengths[first]
        while last < len(documents.lengths):
            longest = max(longest, documents.lengths[last])
            there = documents.starts[last + 1] - documents.starts[first]
            width = (last + 1 - first) * longest if self.pads else there
            if width > most or width > max(_FEW_TOKENS, 2 * there):
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
        assert self._winners is not None
        owners, count = tokens.owners, len(documents.ragged.lengths)
        some, step = at_once(tokens.vectors, self.longest, self.width, self.budget.products, self.x.device)
        for first in range(0, tokens.vectors, some):
            part = slice(first, min(first + some, tokens.vectors))
            for start in range(0, count, step):
                few = slice(start, min(start + step, count))
                at, starts = documents.ragged.of(few), documents.starts[few]
                index = self._winners[part, few].long().add_(starts - at.start)
                weights = grad[:, few].index_select(0, owners[part])
                if into[0] is not None:
                    into[0][part] += embedding_bag(index, features[1][at], per_sample_weights=weights, mode="sum")
                if into[1] is not None:
                    _add_at_(into[1][at], index, weights, features[0][part])


@dataclass(frozen=True)
class Items:
    """The rows, or the columns, of a tile, which consist of several vectors each.

    Args:
        ragged: the items alone.
        starts: (items + 1,), where the vectors of each start, on the device.
    """

    ragged: Ragged
    starts: Tensor

    @classmethod
    def of(cls, items: Ragged, starts: Tensor, at: slice) -> Items:
        """Return consecutive ones of some items; `starts` are those of all of them."""
        some = starts[at.start : at.stop + 1]
        return cls(Ragged(Partition((at.stop - at.start,)), items.lengths[at]), some - some[0])

    @property
    def vectors(self) -> int:
        """The number of vectors."""
        return self.ragged.starts[-1]

    @property
    def lengths(self) -> Tensor:
        """The number of vectors of each item, on the device."""
        return self.starts.diff()

    @property
    def owners(self) -> Tensor:
        """The item of each vector."""
        index = torch.arange(len(self.starts) - 1, device=self.starts.device)
        return index.repeat_interleave(self.lengths, output_size=self.vectors)

    def add_sums_(self, into: Tensor, numbers: Tensor, part: slice) -> None:
        """Add the sum of each item's rows of `numbers`, of the vectors in `part`: in a fixed order, also on a GPU."""
        ends = self.ragged.starts
        at = slice(bisect_right(ends, part.start) - 1, bisect_left(ends, part.stop))
        offsets = (self.starts[at] - part.start).clamp_(min=0)
        into[at] += embedding_bag(torch.arange(len(numbers), device=offsets.device), numbers, offsets, mode="sum")


def _numbers(of: Sequence[int], device: torch.device) -> Tensor:
    """Return integers on a device; no copy waits for a GPU."""
    made = torch.tensor(of, dtype=torch.int64)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _add_at_(into: Tensor, index: Tensor, weights: Tensor, x: Tensor) -> None:
    """Add weights_tj x_t to the rows of `into` that `index`, (t, j), names: in a fixed order, also on a GPU."""
    found, order = index.flatten().sort(stable=True)
    starts = torch.searchsorted(found, torch.arange(len(into), device=found.device))
    of_x = order.div(index.shape[1], rounding_mode="floor")
    into += embedding_bag(of_x, x, starts, per_sample_weights=weights.flatten()[order], mode="sum")


def _runs(documents: Ragged, some: slice) -> Iterator[tuple[slice, int]]:
    """Yield consecutive documents of equal length, and that length."""
    first = some.start
    for at in range(some.start + 1, some.stop + 1):
        if at == some.stop or documents.lengths[at] != documents.lengths[first]:
            yield slice(first, at), documents.lengths[first]
            first = at
