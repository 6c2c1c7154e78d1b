"""One forward pass with its graph, and the comparison of the second pass with the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .chunks import Chunk, differentiable
from .replay import fresh_autocast_cache


class NoGraphError(ValueError):
    """A representation that should have a gradient has none."""


def with_graph(
    encode: Callable[[], tuple[Tensor, ...]], name: str, *, may_be_frozen: bool = False
) -> tuple[Tensor, ...]:
    """Return encode(), with its graph.

    Raises:
        NoGraphError: if no tensor that it returns has a gradient, and it may not be frozen.
    """
    with torch.enable_grad(), fresh_autocast_cache():
        reps = encode()
    if not may_be_frozen and not any(x.requires_grad for x in reps):
        raise NoGraphError(
            f"the output of {name} has no gradient: is it frozen, its output detached, or this inference mode? "
            "Leave a frozen model out, encode its input by wb.gradcache.encode(model, input, chunk_size), and give the "
            "step the result as a keyword argument, for the loss"
        )
    return reps


def encoded_with_graph(chunk: Chunk) -> tuple[Tensor, ...]:
    """Return the chunk's representations, with their graph.

    The first such pass of a model decides which of its representations have a gradient.

    Raises:
        NoGraphError: if one of these has none.
    """
    encoder = chunk.encoder
    reps = with_graph(chunk.encode, encoder.name, may_be_frozen=encoder.may_be_frozen)
    encoder.trained = encoder.trained or [x.requires_grad for x in reps]
    for number, (x, trained) in enumerate(zip(reps, encoder.trained, strict=False)):
        if trained and not x.requires_grad:
            raise NoGraphError(f"representation {number} of {encoder.name} has a gradient in some chunks, not in all")
    return reps


def difference(first: Sequence[Tensor], second: Sequence[Tensor], name: str) -> RuntimeError | None:
    """Return the error if the second pass's representations are not the first's, up to a kernel's order of summation.

    They may differ by sqrt(eps) of their norm, in half precision by 4 eps.
    """
    reason = None
    if [x.shape for x in first] != [x.shape for x in second]:
        reason = f"shapes {[tuple(x.shape) for x in second]}, and the first {[tuple(x.shape) for x in first]}"
    else:
        for number, (x, y) in enumerate(zip(first, second, strict=True)):
            y = y.detach()
            if torch.equal(x, y) or not differentiable(x) or not x.isfinite().all():
                continue
            away, size = torch.linalg.vector_norm(x - y).item(), torch.linalg.vector_norm(x).item()
            eps = torch.finfo(x.dtype).eps
            if not away <= min(eps**0.5, 4 * eps if x.dtype.itemsize == 2 else 1.0) * size:
                reason = f"another representation {number} than the first (they differ by {away:.1e} of {size:.1e})"
                break
    if reason is None:
        return None
    return RuntimeError(
        f"the second forward pass of {name} gave {reason}: the gradient would be wrong. "
        "Random numbers of PyTorch, Python and NumPy and registered buffers are set back; does the model change a "
        "tensor or number that is none of these?"
    )
