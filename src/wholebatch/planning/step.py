"""A step with its encoders: its memory at the peak, and the settings that are worth a line of the table.

A rank's memory at the peak of a step:

    model + features + max(activations + loss, gradients)          all rows encoded at once
    model + 2 features + max(kept graphs + max(loss, a chunk's activations),
                             features + max(gradients + a chunk's activations, kept graphs))      GradCache

Gradients of parameters appear in the backward pass; gradients of features count among the loss's bytes until the loss
is done. GradCache holds the representations twice, the second time as leaves.

A step's time is the loss's, plus that of 3 forward passes of the encoders (1 forward, 2 backward), or 4 for a chunk
that is encoded again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from operator import mul

from ..exchange import USED_EXCHANGES
from ..sweep.memory import Memory
from .counted import work_of
from .rates import Work
from .shapes import ExchangeUsed, Shapes
from .sizes import Sizes

_FILLED = 0.9  # of the limit, at most, is filled: a prediction may be some percent too small
_LEAST_KEPT = 0.1  # of S: keeping a smaller part is not worth a line
_LARGEST = 2**40 - 1  # rows of a rank


@dataclass(frozen=True)
class Setting:
    """The settings to choose."""

    exchange: ExchangeUsed
    kept_size: int = 0  # bytes of a kept entry of exp(S), `WINNERS` for late interaction; 0: "flat"
    kept_bytes: int | None = None  # the value of `memory=` where only a part is kept
    chunk_size: int | None = None  # rows that are encoded at a time; None: all
    kept_graphs: int = 0  # chunks that are not encoded again

    def memory(self, shapes: Shapes) -> Memory:
        """Return the value of `memory=` for the loss."""
        if not self.kept_size:
            return "flat"
        return shapes.memory_for(self.kept_size) if self.kept_bytes is None else self.kept_bytes


@dataclass(frozen=True)
class Step:
    """The planned step, without the settings to choose."""

    shapes: Shapes  # of the loss
    sizes: Sizes  # of the encoders, and of all else that a rank holds

    @property
    def activations(self) -> tuple[int, ...]:
        """Return the bytes that each encoder keeps of an example for its backward pass; () if they are not known."""
        each, items = self.sizes.activations, self.shapes.items_per_example
        tower_bytes = each * len(items) if len(each) == 1 else each
        return tuple(map(mul, tower_bytes, items)) if any(each) else ()

    def work(self, setting: Setting) -> Work:
        """Return the work of the loss."""
        return work_of(self.shapes, setting.exchange, setting.memory(self.shapes))

    def num_chunks(self, setting: Setting) -> int:
        """Return the number of chunks of all encoders; 0 without gradient caching."""
        return 0 if setting.chunk_size is None else len(self.activations) * ceil(self.shapes.rows / setting.chunk_size)

    def peak(self, setting: Setting) -> int:
        """Return the bytes at the peak."""
        features, loss_bytes = self.shapes.feature_bytes, self.work(setting).loss
        held = self.sizes.model_bytes + self.shapes.center_bytes + features
        if setting.chunk_size is None:
            return held + max(self.shapes.rows * sum(self.activations) + loss_bytes, self.sizes.gradient_bytes)
        rows = min(setting.chunk_size, self.shapes.rows)
        kept, left = 0, setting.kept_graphs
        for bytes_of_row in self.activations:
            graphs = min(left, self.num_chunks(setting) // len(self.activations))
            kept, left = kept + graphs * rows * bytes_of_row, left - graphs
        chunk_bytes = rows * max(self.activations)
        # kept graphs are freed as gradients appear
        second_pass = features + max(self.sizes.gradient_bytes + chunk_bytes, kept)
        return held + features + max(kept + max(loss_bytes, chunk_bytes), second_pass)


def worthwhile_settings(step: Step, limit: int) -> list[Setting]:
    """Return the settings of a step, without gradient caching and with it.

    Where they are not asked for, chunks are small enough that four fit in the limit, and no graphs are kept, or as many
    as fit in nine tenths of it.
    """
    shapes, room = step.shapes, int(_FILLED * limit)
    chunk_size, keep_graphs = step.sizes.chunk_size, step.sizes.keep_graphs
    rings = shapes.ranks > 1 and not shapes.has_classes and shapes.device == "cpu"
    exchanges: tuple[ExchangeUsed, ...] = USED_EXCHANGES if rings else ("gather",)
    settings = []
    for chunked in (False, True) if step.activations else (False,):
        for exchange in exchanges:
            for kept_size in (0, *shapes.kept_sizes()):
                setting = Setting(exchange, kept_size)
                if chunked:
                    rows = _chunk(step, setting, limit) if chunk_size is None else chunk_size
                    setting = replace(setting, chunk_size=rows, kept_graphs=keep_graphs or 0)
                settings.append(setting)
                if kept_size == min(shapes.kept_sizes(), default=0) and step.peak(setting) > limit:
                    settings += _keep_partly(step, setting, room)
                if chunked and keep_graphs is None:
                    fits = lambda kept, base=setting: step.peak(replace(base, kept_graphs=kept)) <= room  # noqa: E731
                    graphs = _largest_fitting(step.num_chunks(setting) - 1, fits)
                    settings += [replace(setting, kept_graphs=graphs)] if graphs else []
    return settings


def _keep_partly(step: Step, setting: Setting, limit: int) -> list[Setting]:
    """Return the setting that keeps as much of exp(S) as fits, if that is worth a line."""
    room, tiles = limit - step.peak(replace(setting, kept_size=0)), step.shapes.memory_for(0)
    if room < _LEAST_KEPT * (step.shapes.memory_for(setting.kept_size) - tiles):
        return []
    kept_part = replace(setting, kept_bytes=tiles + room)
    return [kept_part] if step.peak(kept_part) <= limit else []


def _chunk(step: Step, setting: Setting, limit: int) -> int:
    """Return the largest power of two such that four chunks fit."""
    most = max(step.activations)
    room = limit - step.peak(replace(setting, chunk_size=1)) + most
    fits = max(1, min(room // (4 * most), ceil(step.shapes.rows / 2)))
    return 1 << (int(fits).bit_length() - 1)


def largest_batch(step: Step, setting: Setting, limit: int) -> int:
    """Return the largest global batch that fits, a multiple of the ranks."""
    ranks = step.shapes.ranks

    def fits(rows: int) -> bool:
        return replace(step, shapes=replace(step.shapes, batch_size=rows * ranks)).peak(setting) <= limit

    return ranks * _largest_fitting(_LARGEST, fits)


def _largest_fitting(largest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if all smaller ones do; 0 if 1 does not."""
    return bisect_left(range(1, largest + 1), True, key=lambda number: not fits(number))
