"""What a step of a loss takes on one rank: multiply-adds, exponentials, bytes in memory, bytes on the wire.

All of it is known before anything runs, from the shapes alone. With b rows on this rank, B on all W, d numbers each, of
s bytes as features and of a bytes in sums (4; 8 for float64), one unit being b B d multiply-adds:

               multiply-adds    entries of S   memory, beside features and their gradients
    CLIP       4 units          b B            tiles, and   gather: B d (s + 2a) + 2 b d a
    InfoNCE    4 units          b B                         ring:   6 b d a, on three ranks and more 7
                                                            alone:  2 b d a
    SigLIP     3 units          b B            the same, but gather: 2 B d a + 2 b d a
    NT-Xent    4 units of half  (2b)(2B) / 2   as CLIP's of 2b rows, and Z

(Gather: Y, its gradient, the buffer of the reduce-scatter; the gradients of X and of own rows of Y. Ring: X's gradient,
two blocks of Y, two of its gradient, one that arrives. Alone: both gradients.) The tiles are two of side x side, and
for half precision the rows that are widened. Gradients in half precision are made beside those in float32.

What `memory=` keeps of exp(S) is not computed again: its entries save one unit in four, and one of two exponentials.

The wire, sent by each rank: Y out and its gradient home, (W - 1)/W B d numbers each by "gather", (W - 1) b d and W b d
by "ring"; and O(B) sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Literal

import torch

from .._precision import accumulation_dtype
from ..exchange import num_entries
from ..exchange.schedule import full, half
from ..exchange.select import automatic
from ..partition import Partition
from ..sweep import default_side
from ..sweep.memory import Budget, Memory, fit

LossName = Literal["clip", "info_nce", "siglip", "nt_xent"]
LOSSES: tuple[LossName, ...] = ("clip", "info_nce", "siglip", "nt_xent")
Exchange = Literal["gather", "ring"]


@dataclass(frozen=True)
class Shapes:
    """Of a step.

    Args:
        loss: its name.
        batch: B, pairs on all ranks.
        dim: d.
        ranks: W.
        dtype: of the features.
        device: "cpu" or "cuda", on which the side of a tile depends.
    """

    loss: LossName
    batch: int
    dim: int
    ranks: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    @property
    def rows(self) -> int:
        """b, of the rank that has most."""
        return ceil(self.batch / self.ranks)

    @property
    def symmetric(self) -> bool:
        """Whether S is features against themselves; its rows are then those of both views."""
        return self.loss == "nt_xent"

    @property
    def partition(self) -> Partition:
        """Who owns which rows of S."""
        counts = Partition.even(self.batch, self.ranks).counts
        return Partition(tuple(2 * n for n in counts)) if self.symmetric else Partition(counts)

    @property
    def side(self) -> int:
        """Of a tile."""
        return default_side(torch.device(self.device))

    @property
    def entries(self) -> int:
        """Of S, that the rank with most computes."""
        columns = self.partition
        if self.symmetric:
            return max(num_entries(half(columns, rank), self.side) for rank in range(self.ranks))
        return num_entries(full(columns.counts[0], columns, 0), self.side)

    def exchange(self) -> Exchange:
        """What "auto" is for them."""
        return automatic(self.partition.total, self.dim * accumulation_dtype(self.dtype).itemsize)

    def budget(self, memory: Memory) -> Budget:
        """What `memory=` is for them; SigLIP keeps nothing."""
        entries = 0 if self.loss == "siglip" else self.entries
        return fit(memory, entries=entries, side=self.side, dtype=accumulation_dtype(self.dtype))


@dataclass(frozen=True)
class Work:
    """Of one step, on the rank with most.

    Args:
        flops: two for each multiply-add.
        entries: of S, of the forward pass.
        again: of S, that the backward pass computes once more.
        features: bytes of X and Y and of their gradients.
        loss: bytes at the peak of the loss, beside these.
        wire: bytes that it sends.
        messages: collectives, or messages to other ranks, one after the other.
    """

    flops: float
    entries: int
    again: int
    features: int
    loss: int
    wire: float
    messages: int


def work_of(shapes: Shapes, exchange: Exchange, memory: Memory) -> Work:
    """A step with these settings.

    >>> work = work_of(Shapes("clip", 8192, 512, 1), "gather", "flat")
    >>> work.flops / (2 * 8192**2 * 512), work.loss // 10**6
    (4.0, 37)
    >>> kept = work_of(Shapes("clip", 8192, 512, 1), "gather", 2**30)
    >>> kept.flops / work.flops, kept.again
    (0.75, 0)
    """
    w, d = shapes.ranks, shapes.dim
    s, a = shapes.dtype.itemsize, accumulation_dtype(shapes.dtype).itemsize
    budget = shapes.budget(memory)
    entries, kept = shapes.entries, min(budget.kept, shapes.entries)
    backward = 2 if shapes.loss == "siglip" else 3
    again = 0 if shapes.loss == "siglip" else entries - kept
    flops = 2 * d * (entries * (1 + min(backward, 2)) + again)

    columns = shapes.partition
    b, total = max(columns.counts), columns.total
    cells = 2 * budget.side**2 * a + (2 * budget.side * d * a if s < a else 0)
    blocks = min(budget.side, b) * min(budget.side, total) / budget.side**2
    tiles = int(cells * blocks) + budget.kept * budget.kept_dtype.itemsize
    if w == 1:
        moved = 2 * b * d * a if not shapes.symmetric else b * d * a
    elif exchange == "ring":
        moved = (6 if w == 2 else 7) * b * d * a
    elif shapes.loss == "siglip":
        moved = 2 * total * d * a + 2 * b * d * a
    else:
        moved = total * d * (s + 2 * a) + 2 * b * d * a
    if shapes.symmetric:
        moved += b * d * a  # Z, made of both views
    if s < a:
        moved += 2 * shapes.rows * d * s
    numbers = 8 * 6 * total if exchange == "gather" else 8 * 6 * 2 * b
    return Work(
        flops,
        entries,
        again,
        features=4 * shapes.rows * d * s,
        loss=tiles + moved + numbers,
        wire=_wire(shapes, exchange, b, total, s, a),
        messages=0 if w == 1 else 6 if exchange == "gather" else 5 * w,
    )


def _wire(shapes: Shapes, exchange: Exchange, b: int, total: int, s: int, a: int) -> float:
    w, d = shapes.ranks, shapes.dim
    if w == 1:
        return 0
    if exchange == "gather":
        return (w - 1) / w * total * (d * (s + a) + 3 * 8)
    steps = w // 2 if shapes.symmetric else w - 1
    return steps * b * (2 * d * s + 2 * 8) + (steps + 1) * b * (d * a + 8)
