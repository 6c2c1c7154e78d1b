"""The largest product of each document, and the first token that has it, fast on a CPU.

torch finds the place of a maximum one number after the other, and a maximum of floats not much faster, because a NaN
must win. Maxima of integers are several times faster. The bits of floats, read as integers, are in the order of the
floats where these are positive, and in the opposite order where they are negative:

    max_u P_u  =  the largest integer, where it is not negative; else the smallest one

    A_u = sign(P_u - max P)            0 at the maxima, else -1
    max_u (c A_u + U - u) = U - w      of U numbers, c >= U; w the first place of the maximum: the others are 0 or less

These are exact, for the difference of different floats is never 0. NaN and infinity would be lost: `finite` rules them
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .products import Factor

_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def finite(x: Factor, y: Factor) -> bool:
    """Return whether no product of a row of x and one of y can overflow or be NaN, by |x_i . y_j| <= |X| |Y|."""
    x_norm, y_norm = (sum(float(torch.linalg.vector_norm(part)) for part in factor) for factor in (x, y))
    return x_norm * y_norm < torch.finfo(torch.float32).max  # False for NaN


def maxima(
    scores: Tensor, shapes: Sequence[Sequence[int]], *, places: bool, integers: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the maximum of each document, (tokens, documents), and if asked for where it is first, as any number type.

    Args:
        scores: (tokens, tokens of all documents); with places they are lost.
        shapes: documents and their length, for each run of documents of one length.
        places: whether places are wanted.
        integers: whether to compare integers: for finite scores on a CPU.
    """
    runs, first, document = [], 0, 0
    best = scores.new_empty(len(scores), sum(count for count, _ in shapes))
    for count, length in shapes:
        run = scores[:, first : first + count * length].unflatten(1, (count, length))
        runs.append((run, slice(document, document + count)))
        first, document = first + count * length, document + count
    if integers:
        _maxima_of_bits(runs, best)
        return best, _first_places(scores, runs, best) if places else None
    winners = best.new_empty(best.shape, dtype=torch.int64) if places else None
    for run, documents in runs:
        if winners is None:
            torch.amax(run, 2, out=best[:, documents])
        else:
            best[:, documents], winners[:, documents] = run.max(2)
    return best, winners


def _maxima_of_bits(runs: list[tuple[Tensor, slice]], best: Tensor) -> None:
    """Write the maxima of finite scores, (tokens, documents, U) for each run, into the columns of its documents."""
    bits = best.view(_INTEGERS[best.dtype])
    for run, documents in runs:
        torch.amax(run.view(bits.dtype), 2, out=bits[:, documents])
    negative = (bits < 0).any(0).tolist()
    for run, documents in runs:
        if any(negative[documents]):
            run_bits = bits[:, documents]
            run_bits.copy_(torch.where(run_bits < 0, run.view(bits.dtype).amin(2), run_bits))


def _first_places(scores: Tensor, runs: list[tuple[Tensor, slice]], best: Tensor) -> Tensor:
    """Return where each document's maximum is first, as floats, from the maxima."""
    left = _tokens_left(tuple((run.shape[1], run.shape[2]) for run, _ in runs), scores.dtype)
    for run, documents in runs:
        run.sub_(best[:, documents, None])
    torch.add(left, scores.sign_(), alpha=max(run.shape[2] for run, _ in runs), out=scores)
    places = torch.empty_like(best)
    for run, documents in runs:
        bits = run.view(_INTEGERS[best.dtype]).amax(2)
        torch.sub(run.shape[2], bits.view(best.dtype), out=places[:, documents])
    return places


@lru_cache(16)  # the parts of a tile have the same documents one after the other
def _tokens_left(shapes: tuple[tuple[int, int], ...], dtype: torch.dtype) -> Tensor:
    """Return how many tokens of its document are left from each token on."""
    left = [number for count, length in shapes for number in [*range(length, 0, -1)] * count]
    return torch.tensor(left, dtype=dtype, device="cpu")
