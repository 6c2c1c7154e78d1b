"""What a step of a loss takes on one rank: multiply-adds, exponentials, bytes in memory, bytes on the wire.

All of it is known before anything runs, from the shapes alone. With b rows on this rank, B on all W, d numbers each, of
s bytes as features and of a bytes in sums (4; 8 for float64), one unit being b B d multiply-adds:

               multiply-adds   entries of S    memory, beside features and their gradients
    CLIP       4 units         b B             tiles, and   gather: B d (s + 2a) + 2 b d a
    InfoNCE    4 units         b B                          ring:   b d (2s + 4a)
                                                            alone:  2 b d a
    SigLIP     3 units         b B             as CLIP, but gather: 2 B d a + 2 b d a
    NT-Xent    4 of half       (2b)(2B) / 2    as CLIP with 2b rows in a bytes, and   ring: b d a more
    SupCon     4 of half       b B / 2         the same with b rows
    PartialFC  4 k B d         k B             the larger of tiles + k d a + B d (s + 2a), k d s + B d (s + 5a)

Gather: Y, its gradient, the buffer of the reduce-scatter; the gradients of X and of own rows of Y. Ring: X's gradient,
two blocks of Y, two of its gradient, one that arrives. Alone: both gradients, or of a symmetric S the rows of unit
length and their gradient. PartialFC, of k classes on each rank: the gradient of their centers, which of a sample takes
the place of the last step's; of all ranks' embeddings they, of unit length and their gradient, then what becomes of it
when the tiles are gone. The tiles are two of side x side, and for half precision the rows that are widened; in half
precision, a gradient is beside the one in float32 that it is rounded from.

What `memory=` keeps of exp(S) is not computed again: its entries save one unit in four, and one of two exponentials.

The wire, sent by each rank: by "gather" Y out and its gradient home, (W - 1)/W B d numbers each; by "ring" Y in each of
two passes (SigLIP: one), (W - 1) b d numbers each, and its gradient, W b d; and O(B) sums. Of PartialFC embeddings out
and their gradient home.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal, get_args

import torch

from .._precision import accumulation_dtype
from ..exchange import num_entries
from ..exchange.schedule import full, half
from ..exchange.select import automatic
from ..partition import Partition
from ..sweep import default_side
from ..sweep.memory import Budget, Memory, fit

LossName = Literal["clip", "info_nce", "siglip", "nt_xent", "sup_con", "partial_fc"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
ExchangeUsed = Literal["gather", "ring"]


@dataclass(frozen=True)
class Shapes:
    """Of a step.

    Args:
        loss: its name.
        batch: B, examples on all ranks: pairs, or images of classes.
        dim: d.
        ranks: W.
        dtype: of the features.
        device: "cpu" or "cuda", on which the side of a tile depends, and whether there is a ring: NCCL runs none.
        classes: C, of PartialFC, on all ranks.
        sample_rate: of PartialFC.
    """

    loss: LossName
    batch: int
    dim: int
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    classes: int = 0
    sample_rate: float = 1.0

    @property
    def sums_size(self) -> int:
        """a, bytes of a number in sums and gradients."""
        return accumulation_dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """s, bytes of a number that travels; rows of unit length are made in the precision of sums."""
        return self.sums_size if self.symmetric else self.dtype.itemsize

    @property
    def towers(self) -> int:
        """Features of each example."""
        return 1 if self.loss in ("sup_con", "partial_fc") else 2

    @property
    def rows(self) -> int:
        """b, of the rank that has most."""
        return ceil(self.batch / self.ranks)

    @property
    def centers(self) -> int:
        """Of classes, on the rank that has most."""
        return ceil(self.classes / self.ranks)

    @property
    def sampled(self) -> int:
        """Classes of a step on a rank: labels, and of the others each with one probability; rarely more than this."""
        if self.sample_rate == 1:
            return self.centers
        with_label = self.classes * (1 - (1 - 1 / self.classes) ** self.batch)
        others = self.classes - with_label
        spread = (others * self.sample_rate * (1 - self.sample_rate) / self.ranks) ** 0.5
        return min(self.centers, ceil((with_label + self.sample_rate * others) / self.ranks + 3 * spread))

    @property
    def symmetric(self) -> bool:
        """Whether S is features against themselves."""
        return self.loss in ("nt_xent", "sup_con")

    @property
    def partition(self) -> Partition:
        """Who owns which rows of Y; of a symmetric S they are those of all views."""
        counts = Partition.even(self.batch, self.ranks).counts
        return Partition(tuple(2 * n for n in counts)) if self.loss == "nt_xent" else Partition(counts)

    @property
    def side(self) -> int:
        """Of a tile."""
        return default_side(torch.device(self.device))

    @property
    def entries(self) -> int:
        """Of S, on the first rank, which has most rows."""
        if self.loss == "partial_fc":
            return self.sampled * self.batch
        columns = self.partition
        visits = half(columns, 0) if self.symmetric else full(columns.counts[0], columns, 0)
        return num_entries(visits, self.side)

    def exchange(self) -> ExchangeUsed:
        """What "auto" is for them."""
        if self.loss == "partial_fc":
            return "gather"
        rings = self.device == "cpu"
        return automatic(self.partition.total, self.dim * self.sums_size, rings=rings)

    def budget(self, memory: Memory) -> Budget:
        """What `memory=` is for them. SigLIP keeps nothing; SupCon, which has several positives, nothing rounded."""
        entries = 0 if self.loss == "siglip" else self.entries
        dtype = accumulation_dtype(self.dtype)
        return fit(memory, entries=entries, side=self.side, dtype=dtype, exact=self.loss == "sup_con")

    def memory_for(self, itemsize: int) -> int:
        """The bytes with which all of exp(S) is kept, in so many bytes for each entry."""
        return 2 * self.side**2 * self.sums_size + self.entries * itemsize

    def kept_sizes(self) -> tuple[int, ...]:
        """Bytes of an entry of exp(S), of all ways to keep it."""
        if self.loss == "siglip":
            return ()
        return (self.sums_size,) if self.sums_size == 8 or self.loss == "sup_con" else (2, self.sums_size)


@dataclass(frozen=True)
class Work:
    """Of one step, on the rank with most.

    Args:
        flops: two for each multiply-add.
        again: of them, those that compute S once more.
        entries: of S.
        kept: of them, from the forward pass for the backward pass.
        kept_size: bytes of each that is kept.
        features: bytes of X and Y, or of embeddings; their gradients take as many.
        centers: bytes of PartialFC's centers and of their gradient.
        loss: bytes at the peak of the loss, beside these; gradients of features come out of it.
        wire: bytes that it sends.
        messages: collectives, or messages to other ranks, one after the other.
    """

    flops: float
    again: float
    entries: int
    kept: int
    kept_size: int
    features: int
    centers: int
    loss: int
    wire: float
    messages: int


def work_of(shapes: Shapes, exchange: ExchangeUsed, memory: Memory) -> Work:
    """A step with these settings.

    >>> work = work_of(Shapes("clip", 8192, 512), "gather", "flat")
    >>> work.flops / (2 * 8192**2 * 512), work.loss // 10**6
    (4.0, 37)
    >>> kept = work_of(Shapes("clip", 8192, 512), "gather", 2**30)
    >>> kept.flops / work.flops, kept.kept == kept.entries
    (0.75, True)
    """
    budget = shapes.budget(memory)
    entries, kept = shapes.entries, min(budget.kept, shapes.entries)
    again = 0 if shapes.loss == "siglip" else entries - kept
    held = _of_tiles(shapes, exchange, budget) + kept * budget.kept_dtype.itemsize
    wire, messages = _wire(shapes, exchange)
    return Work(
        flops=2 * shapes.dim * (3 * entries + again - _mirrored(shapes)),
        again=2 * shapes.dim * again,
        entries=entries,
        kept=kept,
        kept_size=budget.kept_dtype.itemsize,
        features=shapes.towers * shapes.rows * shapes.dim * shapes.dtype.itemsize,
        centers=_of_centers(shapes),
        loss=_of_classes(shapes, held) if shapes.loss == "partial_fc" else _at_the_peak(shapes, exchange, held),
        wire=wire,
        messages=messages,
    )


def _mirrored(shapes: Shapes) -> int:
    """Entries of tiles on the diagonal of a symmetric S, whose gradient is multiplied by their rows alone."""
    if not shapes.symmetric:
        return 0
    tiles, rest = divmod(shapes.partition.counts[0], shapes.side)
    return tiles * shapes.side**2 + rest**2


def _of_centers(shapes: Shapes) -> int:
    """Bytes of centers and of their gradient, which is a sample's, or of all."""
    gradient = shapes.centers if shapes.sample_rate == 1 else shapes.sampled
    return (shapes.centers + gradient) * shapes.dim * shapes.dtype.itemsize if shapes.classes else 0


def _of_tiles(shapes: Shapes, exchange: ExchangeUsed, budget: Budget) -> int:
    """Bytes of two tiles, and of their rows of X and Y in the precision of sums where features have another."""
    sums, of_rank = shapes.sums_size, max(shapes.partition.counts)
    rows = min(budget.side, shapes.sampled if shapes.loss == "partial_fc" else of_rank)
    cols = min(budget.side, of_rank if exchange == "ring" else shapes.partition.total)
    # Rows alone have weights: a CPU never touches the second tile, which is then no memory.
    number = 1 if shapes.loss == "info_nce" and shapes.device == "cpu" else 2
    widened = 0 if shapes.symmetric or shapes.dtype.itemsize == sums else (rows + cols) * shapes.dim
    return (number * rows * cols + widened) * sums


def _at_the_peak(shapes: Shapes, exchange: ExchangeUsed, held: int) -> int:
    """Bytes of what travels, and of gradients before they are the features'; with those that the sweep holds."""
    s, a, d, w = shapes.size, shapes.sums_size, shapes.dim, shapes.ranks
    b, total = max(shapes.partition.counts), shapes.partition.total
    of_sums = 8 * 6 * (total if exchange == "gather" else 2 * b)
    if w == 1:
        rounded = 0 if shapes.dtype.itemsize == a else shapes.towers * shapes.rows * d * shapes.dtype.itemsize
        return 2 * b * d * a + max(held, rounded) + of_sums
    if exchange == "ring":
        moved = b * d * (2 * s + 4 * a) + (b * d * a if shapes.symmetric else 0) + (b * d * s if s < a else 0)
    elif shapes.loss == "siglip":
        moved = 2 * total * d * a + 2 * b * d * a
    else:
        moved = total * d * (s + 2 * a) + 2 * b * d * a
    return held + moved + of_sums


def _of_classes(shapes: Shapes, held: int) -> int:
    """Bytes of PartialFC: in the sweep; when the centers' gradient is rounded; and behind it."""
    s, a, d = shapes.size, shapes.sums_size, shapes.dim
    embeddings, centers = shapes.batch * d, shapes.sampled * d
    drawn = 16 * shapes.centers if shapes.sample_rate < 1 else 0
    in_sweep = held + centers * a + embeddings * (s + 2 * a)
    rounding = centers * (a + s) + embeddings * a if s < a else 0
    behind = centers * s + embeddings * (s + 5 * a)
    if s < a:  # embeddings are widened once, and their gradient is rounded once
        behind += embeddings * (a + s)
    return drawn + max(in_sweep, rounding, behind)


def _wire(shapes: Shapes, exchange: ExchangeUsed) -> tuple[float, int]:
    """Bytes that a rank sends, and messages one after the other."""
    s, a, d, w = shapes.size, shapes.sums_size, shapes.dim, shapes.ranks
    b, total = max(shapes.partition.counts), shapes.partition.total
    if w == 1:
        return 0, 0
    if shapes.loss == "partial_fc":
        return (w - 1) / w * total * (2 * d * s + 4 * 8), 9
    if exchange == "gather":
        return (w - 1) / w * total * (d * (s + a) + 3 * 8), 6
    steps = w // 2 if shapes.symmetric else w - 1
    passes = 1 if shapes.loss == "siglip" else 2  # in each, those of a step pass all ranks at once
    return steps * b * (passes * d * s + 2 * 8) + (steps + 1) * b * (d * a + 8), passes * (steps + 1)
