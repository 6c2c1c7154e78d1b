"""A step with its encoders: its memory at the peak, and the settings of loss and caching that are worth a line.

A rank's memory at the peak of a step:

    model + features + max(activations + loss, gradients)          all rows encoded at once
    model + 2 features + max(kept graphs + max(loss, a chunk's activations),
                             features + max(gradients + a chunk's activations, kept graphs))      GradCache

Gradients of parameters appear in the backward pass, those of features when the loss is done (before, they are among its
bytes). GradCache has representations once more, as leaves.

A step's time: the loss's, and of the encoders 3 forward passes' multiply-adds (1 forward, 2 backward), 4 where a chunk
is encoded again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil

from ..sweep.memory import Memory
from .work import ExchangeUsed, Shapes, Work, work_of

_FILLED = 0.9  # of the limit, at most, by what is made to fit: a plan may be some percent too small
_LEAST_KEPT = 0.1  # of S, below which keeping a part is not worth a line
_LARGEST = 2**40 - 1  # rows of a rank


@dataclass(frozen=True)
class Step:
    """What is planned, beside the settings that are chosen.

    Args:
        shapes: of the loss.
        model: bytes of parameters, optimizer and what else is there throughout.
        gradients: bytes of the parameters' gradients, which appear in the backward pass.
        activations: bytes that each encoder keeps of a row for its backward pass; empty: not known.
        forward: flops of encoding an example, all towers.
    """

    shapes: Shapes
    model: int
    gradients: int
    activations: tuple[int, ...]
    forward: float

    def of_batch(self, batch: int) -> Step:
        """The same with another batch."""
        return replace(self, shapes=replace(self.shapes, batch=batch))


@dataclass(frozen=True)
class Setting:
    """What one may choose.

    Args:
        exchange: how features travel.
        kept_size: bytes of each entry of exp(S) that is kept; 0: "flat".
        kept_bytes: of all that is kept, where that is a part.
        chunk: rows that are encoded at a time; None: all.
        kept_graphs: chunks that are not encoded again.
    """

    exchange: ExchangeUsed
    kept_size: int = 0
    kept_bytes: int | None = None
    chunk: int | None = None
    kept_graphs: int = 0

    def memory(self, shapes: Shapes) -> Memory:
        """As the loss takes it."""
        if not self.kept_size:
            return "flat"
        return shapes.memory_for(self.kept_size) if self.kept_bytes is None else self.kept_bytes


def worth_a_line(step: Step, limit: int, chunk: int | None, keep_graphs: int | None) -> list[Setting]:
    """Settings of a step, without gradient caching and with it.

    Args:
        step: what is planned.
        limit: bytes that a rank may take.
        chunk: rows that are encoded at a time; None: so many that four fit.
        keep_graphs: chunks that are not encoded again; None: none, and as many as fit, with a tenth of the limit to
            spare.
    """
    shapes = step.shapes
    rings = shapes.ranks > 1 and shapes.loss != "partial_fc" and shapes.device == "cpu"
    exchanges: tuple[ExchangeUsed, ...] = ("gather", "ring") if rings else ("gather",)
    found = []
    for chunked in (False, True) if step.activations else (False,):
        for exchange in exchanges:
            for kept_size in (0, *shapes.kept_sizes()):
                setting = Setting(exchange, kept_size)
                if chunked:
                    rows = _chunk(step, setting, limit) if chunk is None else chunk
                    setting = replace(setting, chunk=rows, kept_graphs=keep_graphs or 0)
                found.append(setting)
                if kept_size == min(shapes.kept_sizes(), default=0) and _peak(step, setting) > limit:
                    found += _partly(step, setting, int(_FILLED * limit))
                graphs = _graphs_that_fit(step, setting, int(_FILLED * limit)) if keep_graphs is None else 0
                if graphs:
                    found.append(replace(setting, kept_graphs=graphs))
    return found


def _partly(step: Step, setting: Setting, limit: int) -> list[Setting]:
    """With as much of exp(S) as fits, where all of it does not, or nothing."""
    flat = replace(setting, kept_size=0)
    room = limit - _peak(step, flat)
    whole = step.shapes.entries * setting.kept_size
    if room < _LEAST_KEPT * whole:
        return []
    tiles = step.shapes.memory_for(0)
    found = replace(setting, kept_bytes=tiles + room)
    return [found] if _peak(step, found) <= limit else []


def _chunk(step: Step, setting: Setting, limit: int) -> int:
    """The largest power of two of which four fit."""
    most, rows = max(step.activations), step.shapes.rows
    room = limit - _peak(step, replace(setting, chunk=1)) + most
    fits = max(1, min(room // (4 * most), ceil(rows / 2)))
    return 1 << (int(fits).bit_length() - 1)


def num_chunks(step: Step, setting: Setting) -> int:
    """Of one encoder."""
    assert setting.chunk is not None
    return ceil(step.shapes.rows / setting.chunk)


def _graphs_that_fit(step: Step, setting: Setting, limit: int) -> int:
    """How many chunks' graphs may be kept, not all."""
    if setting.chunk is None:
        return 0
    chunks = len(step.activations) * num_chunks(step, setting)
    return _most(chunks - 1, lambda kept: _peak(step, replace(setting, kept_graphs=kept)) <= limit)


def _peak(step: Step, setting: Setting) -> int:
    """Bytes."""
    work = work_of(step.shapes, setting.exchange, setting.memory(step.shapes))
    return peak_with(step, setting, work)


def peak_with(step: Step, setting: Setting, work: Work) -> int:
    """Bytes at the peak of a step whose loss takes this work."""
    there = step.model + work.centers + work.features
    if setting.chunk is None:
        return there + max(step.shapes.rows * sum(step.activations) + work.loss, step.gradients)
    rows = min(setting.chunk, step.shapes.rows)
    kept, chunks, left = 0, num_chunks(step, setting), setting.kept_graphs
    for of in step.activations:
        kept += min(left, chunks) * rows * of
        left -= min(left, chunks)
    of_chunk = rows * max(step.activations)
    second_pass = work.features + max(step.gradients + of_chunk, kept)  # kept graphs go as gradients come
    return there + work.features + max(kept + max(work.loss, of_chunk), second_pass)


def largest_batch(step: Step, setting: Setting, limit: int) -> int:
    """The largest batch with which it fits, a multiple of the ranks."""
    ranks = step.shapes.ranks

    return ranks * _most(_LARGEST, lambda rows: _peak(step.of_batch(rows * ranks), setting) <= limit)


def _most(largest: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, if all below it do; 0: none from 1."""
    return bisect_left(range(1, largest + 1), True, key=lambda number: not fits(number))
