"""The cost of a loss's step on one rank, counted in steps of few rows.

The loss itself runs, forward and backward, on ranks that all pass the same tensors (`equal_ranks`), in several small
tiles. Each size that a tensor's number of elements depends on has a prime factor that no other one has: rows here, rows
of all ranks, the side of a tile, numbers of a row, ... So the factors of a tensor's bytes tell what they grow with,

    bytes of a tensor  =  coefficient x product of named sizes         (4 x rows x width: a gradient of the features)

and each moment of a step is a sum of such products, exact for any sizes. A step's peak is the largest of its moments.
Only what is kept of exp(S) follows from `memory=` alone, and is added where a part of it is kept.

               products       entries of S
    CLIP       4 units        b B             of b B d multiply-adds: S, S again, and both gradients
    SigLIP     3 units        b B             S once, with its gradient
    NT-Xent    4 of half      (2b)(2B) / 2    S is symmetric
    PartialFC  4 units        k B             of k classes here
    MaxSim     2 units        tokens          S, and S again to find winners

are not written down anywhere: they are the products of few rows, for each entry of their S.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from .._base.live_bytes import LiveBytes
from .._base.precision import smaller_parts
from ..contract.options import collecting
from ..sweep.memory import Memory
from .equal_ranks import SENT, EqualRanks
from .rates import Work
from .shapes import ExchangeUsed, Shapes, TokenShapes
from .subject import make_step

Terms = Counter[tuple[str, ...]]  # a sum of products of named sizes: the coefficient of each

# Sizes of a counted step. Prime factors identify them, and are none of a number's bytes or of other small counts.
_SIDE, _ROWS, _WIDTH, _CENTERS, _SAMPLE = 23, 61, 13, 97, 71
# Of late interaction: the side, and tokens of a query and a document, such that parts of a tile have prime sizes, too.
_TOKENS = ((41, 11, 13, 19, 23), (53, 31, 7, 27, 11))
_SOME_ROWS, _WIDENED_ROWS, _WIDENED_TOKENS = 29, 17, 37
# Ranks of two steps, which have no factor of a size: of an even number if this is so of the plan, and S is symmetric.
_RANKS, _EVEN_RANKS, _TOKEN_RANKS, _OTHER_TOKEN_RANKS = (5, 7), (10, 14), (3, 9), (10, 14)
_PRODUCTS = {"mm": 0, "addmm": 1, "bmm": 0, "baddbmm": 1}  # by the name: the place of the first factor


@dataclass(frozen=True)
class Counted:
    """The counts of one step of few rows."""

    moments: tuple[Terms, ...]  # bytes at each moment that may be the peak, without those that are never the largest
    products: int  # multiply-adds
    moved: float  # bytes that operations on tiles read and write for each entry of S

    def peak(self, sizes: Mapping[str, float]) -> float:
        """Return the most bytes that a step with these named sizes holds."""
        products = {names: prod(map(sizes.__getitem__, names)) for moment in self.moments for names in moment}
        return max(sum(n * products[names] for names, n in moment.items()) for moment in self.moments)


def _value(terms: Terms, sizes: Mapping[str, float]) -> float:
    return sum(coefficient * prod(map(sizes.__getitem__, names)) for names, coefficient in terms.items())


class _Count(LiveBytes):
    """Count the bytes, the products, and the work on tiles of a step of these shapes."""

    def __init__(self, shapes: Shapes, memory: Memory) -> None:
        super().__init__()
        self._shapes, sizes = shapes, shapes.named_sizes(memory)
        # The largest first: the batch has the factor of the rows.
        self._named = sorted(((int(size), name) for name, size in sizes.items() if size > 1), reverse=True)
        self._held, self._grows = Terms(), False
        self._factors: dict[int, tuple[tuple[str, ...], int]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget everything but the memory that is held now."""
        self.notice_freed()
        self.products, self._moved, self._tiles = 0, 0, 0
        self._before, self._peaks = Counter(self._held), set[frozenset[tuple[tuple[str, ...], int]]]()

    def factors(self, size: int) -> tuple[tuple[str, ...], int]:
        """Return the named sizes that divide a number of bytes, and the rest."""
        if size not in self._factors:
            names, rest = list[str](), size
            for value, name in self._named:
                while rest and rest % value == 0:
                    rest //= value
                    names.append(name)
            self._factors[size] = tuple(names), rest
        return self._factors[size]

    def result(self) -> Counted:
        """Return the counts since `begin`."""
        self.notice_freed()
        largest = list[Terms]()
        for peak in sorted(self._peaks, key=lambda terms: sum(rest for _, rest in terms), reverse=True):
            moment = Terms(dict(peak))
            moment.subtract(self._before)
            if not any(_covers(larger, moment) for larger in largest):
                largest.append(moment)
        # Late interaction multiplies all tokens in the forward pass; elsewhere whole tiles alone are counted.
        entries = self._shapes.entries if isinstance(self._shapes, TokenShapes) else self._tiles * self._shapes.side**2
        return Counted(tuple(largest), self.products, self._moved / max(1, entries))

    def allocated(self, size: int) -> None:
        names, rest = self.factors(size)
        self._held[names] += rest
        self._grows = True

    def freed(self, size: int) -> None:
        if self._grows:  # until now
            self._peaks.add(frozenset(self._held.items()))
        names, rest = self.factors(size)
        self._held[names] -= rest
        self._grows = False

    def operated(self, func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        place = _PRODUCTS.get(func._schema.name.removeprefix("aten::").rstrip("_"))
        if place is not None:
            left, right = inputs[place : place + 2]
            self.products += left.numel() * right.shape[-1]
            sides = [self.factors(size)[0] for size in (left.shape[0], left.shape[-1], right.shape[-1])]
            in_forward = torch._C._current_graph_task_id() == -1
            self._tiles += in_forward and sides == [("side",), ("width",), ("side",)]
        for x in (*inputs, *results):
            size = min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
            names = self.factors(size)[0]
            per_token = "document tokens" in names and "width" not in names
            self._moved += size if names == ("side", "side") or per_token else 0


def _covers(larger: Terms, smaller: Terms) -> bool:
    """Return whether a sum is at least as large as another one, whatever the sizes are."""
    return all(larger.get(names, 0) >= smaller.get(names, 0) for names in {*larger, *smaller})


@contextmanager
def _smaller_parts(shapes: Shapes) -> Iterator[None]:
    """Compute as little at a time as `shapes` of few rows ask for, in one thread, whatever runs outside."""
    width = shapes.embedding_size // shapes.form.similarities
    parts = {"side": shapes.side, "rows": _SOME_ROWS, "numbers": _WIDENED_ROWS * width, "checked centers": 2}
    if isinstance(shapes, TokenShapes):
        parts["numbers"] = _WIDENED_TOKENS * width
        parts["sorted vectors"] = 4 * shapes.longest[1]
        parts["compared numbers"] = parts["sorted vectors"] * width
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode(False), torch.enable_grad(), collecting(None), smaller_parts(parts):
            yield
    finally:
        torch.set_num_threads(threads)


@cache
def _count(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> Counted:
    """Run two steps of few rows, and count the second."""
    with _smaller_parts(shapes):
        step = make_step(EqualRanks(shapes.ranks), shapes, exchange, memory, torch.device("cpu"))
        count = _Count(shapes, memory)
        with count if shapes.has_classes else nullcontext():  # of classes, a step frees the last one's gradient
            step()
        count.begin()
        with count:
            step()
        return count.result()


@cache
def _calls(shapes: Shapes, exchange: ExchangeUsed) -> tuple[tuple[str, Terms], ...]:
    """Return what a step of few rows sends: for each call its name in `SENT`, and the bytes."""
    with _smaller_parts(shapes):
        comm = EqualRanks(shapes.ranks)
        make_step(comm, shapes, exchange, "flat", torch.device("cpu"))()
        count, calls = _Count(shapes, "flat"), []
        for name, sizes in comm.transport.calls:
            total = Terms()
            for names, rest in map(count.factors, sizes):
                total[names] += rest
            calls.append((name, total))
    return tuple(calls)


def forget() -> None:
    """Count again from now on: a declared loss may have changed."""
    _count.cache_clear()
    _calls.cache_clear()


def small(shapes: Shapes, ranks: int) -> Shapes:
    """Return shapes of the same kind with few rows, on so many ranks, on a CPU."""
    if isinstance(shapes, TokenShapes):
        for side, t, u, rows, width in _TOKENS:
            few = replace(
                shapes, query_tokens=t, document_tokens=u, batch_size=rows * ranks, embedding_size=width, ranks=ranks,
                device="cpu", tile_side=side,
            )  # fmt: skip
            if few.documents_stay == shapes.documents_stay:
                break
        return few
    return replace(
        shapes, batch_size=_ROWS * ranks, embedding_size=_WIDTH * shapes.form.similarities, ranks=ranks, device="cpu",
        classes=_CENTERS * ranks if shapes.has_classes else 0, sample_rate=float(shapes.sample_rate == 1),
        tile_side=_SIDE, sample=_SAMPLE if shapes.sample_rate < 1 else _CENTERS if shapes.has_classes else None,
    )  # fmt: skip


def work_of(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> Work:
    """Return the work of a step with these settings.

    >>> work = work_of(Shapes("clip", 8192, 512), "gather", "flat")
    >>> work.flops / (2 * 8192**2 * 512), work.loss // 10**6
    (4.0, 37)
    >>> kept = work_of(Shapes("clip", 8192, 512), "gather", 2**30)
    >>> kept.flops / work.flops, kept.kept
    (0.75, 1.0)
    """
    share, size, kept_bytes = shapes.kept(memory)
    few = _few(shapes)
    flat = _count(few, exchange, "flat")
    kept = _count(few, exchange, few.memory_for(size)) if share else flat
    sizes = shapes.named_sizes(memory)
    peak = kept.peak(sizes) if share == 1 else flat.peak(sizes) + kept_bytes
    half_grad_bytes = int(shapes.products.bytes_of_gradients * sizes["side"] ** 2)  # a CPU has no such products
    wire, messages = _wire(shapes, exchange, sizes)
    return Work(
        flops=(_units(shapes, exchange) - share) * 2 * shapes.embedding_size * shapes.entries,
        moved=((1 - share) * flat.moved + share * kept.moved) * shapes.weighted_entries,
        kept=share,
        kept_size=size if share else 0,
        loss=int(peak) + half_grad_bytes,
        wire=wire,
        messages=messages,
    )


def _units(shapes: Shapes, exchange: ExchangeUsed) -> float:
    """Return the multiply-adds for each entry of S and number of a row, where nothing is kept.

    Tiles on the diagonal of a symmetric S take fewer: there it is the difference of two steps with different others.
    """
    steps = [small(shapes, ranks) for ranks in _RANKS] if shapes.form.symmetric else [_few(shapes)]
    entries = steps[-1].entries - sum(step.entries for step in steps[:-1])
    counts = [_count(step, exchange, "flat").products for step in steps]
    return (counts[-1] - sum(counts[:-1])) / (entries * steps[0].embedding_size)


def _wire(shapes: Shapes, exchange: ExchangeUsed, sizes: Mapping[str, float]) -> tuple[float, int]:
    """Return the bytes that a rank sends, and the messages.

    An exchange has as many calls on any number of ranks, or one more for each further rank, or two of a symmetric S.
    """
    if shapes.ranks == 1:
        return 0.0, 0
    few, more = _EVEN_RANKS if shapes.form.symmetric and shapes.ranks % 2 == 0 else _ranks(shapes)
    further = (shapes.ranks - few) / (more - few)
    calls, more_calls = (_calls(small(shapes, w), exchange) for w in (few, more))
    sent, more_sent = (
        sum(SENT[name](shapes.ranks) * _value(terms, sizes) for name, terms in some) for some in (calls, more_calls)
    )
    messages = round(len(calls) + further * (len(more_calls) - len(calls)))
    return sent + further * (more_sent - sent), messages


def _few(shapes: Shapes) -> Shapes:
    return small(shapes, 1 if shapes.ranks == 1 else _ranks(shapes)[0])


def _ranks(shapes: Shapes) -> tuple[int, int]:
    """Return two numbers of ranks on which few rows run; documents of a query must not be as many."""
    if not isinstance(shapes, TokenShapes):
        return _RANKS
    return _TOKEN_RANKS if shapes.documents_per_query % _TOKEN_RANKS[0] else _OTHER_TOKEN_RANKS
