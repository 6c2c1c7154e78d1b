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

from ..exchange import USED_EXCHANGES
from ..sweep.memory import Memory
from .counted import Work, work_of
from .shapes import ExchangeUsed, Shapes

_FILLED = 0.9  # of the limit, at most, is filled: a prediction may be some percent too small
_LEAST_KEPT = 0.1  # of S: keeping a smaller part is not worth a line
_LARGEST = 2**40 - 1  # rows of a rank


@dataclass(frozen=True)
class Step:
    """The planned step, without the settings to choose.

    Args:
        shapes: of the loss.
        model: bytes of parameters, optimizer and all else that a rank holds throughout.
        gradients: bytes of the parameters' gradients, which appear in the backward pass.
        activations: bytes that each encoder keeps of a row for its backward pass; () if they are not known.
        forward: flops of encoding an example, all towers.
    """

    shapes: Shapes
    model: int
    gradients: int
    activations: tuple[int, ...]
    forward: float


@dataclass(frozen=True)
class Setting:
    """The settings to choose.

    Args:
        exchange: "gather" or "ring".
        kept_size: bytes of a kept entry of exp(S), `WINNERS` for late interaction; 0: "flat".
        kept_bytes: bytes of all kept entries, where only a part is kept.
        chunk_size: rows that are encoded at a time; None: all.
        kept_graphs: chunks that are not encoded again.
    """

    exchange: ExchangeUsed
    kept_size: int = 0
    kept_bytes: int | None = None
    chunk_size: int | None = None
    kept_graphs: int = 0

    def memory(self, shapes: Shapes) -> Memory:
        """Return the value of `memory=` for the loss."""
        if not self.kept_size:
            return "flat"
        return shapes.memory_for(self.kept_size) if self.kept_bytes is None else self.kept_bytes


def worthwhile_settings(step: Step, limit: int, chunk_size: int | None, keep_graphs: int | None) -> list[Setting]:
    """Return the settings of a step, without gradient caching and with it.

    Args:
        step: the planned step.
        limit: bytes that a rank may take.
        chunk_size: rows that are encoded at a time; None: small enough that four chunks fit.
        keep_graphs: chunks that are not encoded again; None: none, and as many as fit in nine tenths of the limit.
    """
    shapes = step.shapes
    rings = shapes.ranks > 1 and not shapes.of_classes and shapes.device == "cpu"
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
                if kept_size == min(shapes.kept_sizes(), default=0) and _peak(step, setting) > limit:
                    settings += _keep_partly(step, setting, int(_FILLED * limit))
                graphs = _graphs_that_fit(step, setting, int(_FILLED * limit)) if keep_graphs is None else 0
                if graphs:
                    settings.append(replace(setting, kept_graphs=graphs))
    return settings


def _keep_partly(step: Step, setting: Setting, limit: int) -> list[Setting]:
    """Return the setting that keeps as much of exp(S) as fits, if that is worth a line."""
    flat = replace(setting, kept_size=0)
    room = limit - _peak(step, flat)
    whole = step.shapes.memory_for(setting.kept_size) - step.shapes.memory_for(0)
    if room < _LEAST_KEPT * whole:
        return []
    tiles = step.shapes.memory_for(0)
    kept_part = replace(setting, kept_bytes=tiles + room)
    return [kept_part] if _peak(step, kept_part) <= limit else []


def _chunk(step: Step, setting: Setting, limit: int) -> int:
    """Return the largest power of two such that four chunks fit."""
    most, rows = max(step.activations), step.shapes.rows
    room = limit - _peak(step, replace(setting, chunk_size=1)) + most
    fits = max(1, min(room // (4 * most), ceil(rows / 2)))
    return 1 << (int(fits).bit_length() - 1)


def num_chunks(step: Step, setting: Setting) -> int:
    """Return the number of chunks of one encoder."""
    assert setting.chunk_size is not None
    return ceil(step.shapes.rows / setting.chunk_size)


def _graphs_that_fit(step: Step, setting: Setting, limit: int) -> int:
    """Return the number of chunks whose graphs fit, fewer than all."""
    if setting.chunk_size is None:
        return 0
    chunks = len(step.activations) * num_chunks(step, setting)
    return _largest_fitting(chunks - 1, lambda kept: _peak(step, replace(setting, kept_graphs=kept)) <= limit)


def _peak(step: Step, setting: Setting) -> int:
    work = work_of(step.shapes, setting.exchange, setting.memory(step.shapes))
    return peak_with(step, setting, work)


def peak_with(step: Step, setting: Setting, work: Work) -> int:
    """Return the bytes at the peak of a step whose loss does this work."""
    features = step.shapes.feature_bytes
    held = step.model + step.shapes.center_bytes + features
    if setting.chunk_size is None:
        return held + max(step.shapes.rows * sum(step.activations) + work.loss, step.gradients)
    rows = min(setting.chunk_size, step.shapes.rows)
    kept, chunks, left = 0, num_chunks(step, setting), setting.kept_graphs
    for bytes_of_row in step.activations:
        kept += min(left, chunks) * rows * bytes_of_row
        left -= min(left, chunks)
    of_chunk = rows * max(step.activations)
    second_pass = features + max(step.gradients + of_chunk, kept)  # kept graphs are freed as gradients appear
    return held + features + max(kept + max(work.loss, of_chunk), second_pass)


def largest_batch(step: Step, setting: Setting, limit: int) -> int:
    """Return the largest global batch that fits, a multiple of the ranks."""
    ranks = step.shapes.ranks

    def fits(rows: int) -> bool:
        return _peak(replace(step, shapes=replace(step.shapes, batch_size=rows * ranks)), setting) <= limit

    return ranks * _largest_fitting(_LARGEST, fits)


def _largest_fitting(largest: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, if all smaller ones do; 0 if 1 does not."""
    return bisect_left(range(1, largest + 1), True, key=lambda number: not fits(number))
