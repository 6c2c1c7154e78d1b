"""The figures that are counted of a loss's step on one rank, and those of each exchange."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .shapes import ExchangeUsed, Shapes


@dataclass(frozen=True)
class Work:
    """The work of one step on the rank with most.

    Args:
        flops: two for each multiply-add.
        again: the part of `flops` that computes S a second time.
        entries: of S; in late interaction as `late_interaction` counts them.
        kept: the part of `entries` that is kept from the forward pass for the backward pass.
        kept_size: bytes of a kept entry; in late interaction `sizes.WINNERS`.
        features: bytes of X and Y, or of embeddings; their gradients take as many.
        centers: bytes of PartialFC's centers and of their gradient.
        loss: further bytes at the peak of the loss, the features' gradients included.
        wire: bytes that the rank sends.
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


@dataclass(frozen=True)
class Transfer:
    """The cost of an exchange for a loss of pairs on more than one rank.

    Args:
        columns: the most columns of a block.
        sums: the number of columns whose sums the rank holds.
        rows: bytes of the rows and gradients that it holds for others or from others.
        fetched: the part of `rows` that are rows of Y, which are there in the forward pass, too.
        reducing: the part that is allocated after the last tile.
        wire: bytes that it sends.
        messages: collectives, or messages to other ranks, one after the other.
    """

    columns: int
    sums: int
    rows: int
    fetched: int
    reducing: int
    wire: float
    messages: int


def _gather(shapes: Shapes) -> Transfer:
    s, a, d, w = shapes.size, shapes.sums_size, shapes.embedding_size, shapes.ranks
    b, total, columns = max(shapes.partition.counts), shapes.partition.total, shapes.columns.total
    held = 2 * a if shapes.one_pass else s + 2 * a
    return Transfer(
        columns=columns,
        sums=columns,
        rows=total * d * held + (shapes.staying + b) * d * a,
        fetched=total * d * s,
        reducing=0 if shapes.one_pass else (total + b) * d * a,
        wire=(w - 1) / w * (total * d * (s + a) + columns * 3 * 8),
        messages=6,
    )


def _ring(shapes: Shapes) -> Transfer:
    s, a, d, w = shapes.size, shapes.sums_size, shapes.embedding_size, shapes.ranks
    b, columns = max(shapes.partition.counts), max(shapes.columns.counts)
    steps = w // 2 if shapes.symmetric else w - 1
    passes = 1 if shapes.one_pass else 2  # in each, all ranks send a step's rows at once
    held = b * d * (2 * s + 3 * a) + shapes.staying * d * a
    return Transfer(
        columns=columns,
        sums=2 * columns,
        rows=held + (b * d * a if shapes.symmetric else 0) + (b * d * s if s < a else 0),
        fetched=2 * b * d * s,
        reducing=0,
        wire=steps * (passes * b * d * s + columns * 2 * 8) + (steps + 1) * (b * d * a + columns * 8),
        messages=passes * (steps + 1),
    )


TRANSFERS: dict[ExchangeUsed, Callable[[Shapes], Transfer]] = {"gather": _gather, "ring": _ring}
"""The cost of each exchange; an exchange that is added has an entry here."""
