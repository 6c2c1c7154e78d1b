"""The classes that an embedding is most like, found a tile of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._checks import check_alike, check_count, check_features
from .._precision import accumulation_dtype
from ..comm import Communicator, handshake
from ..partition import Partition
from .logits import Logits, check_directions, flat

_CLASSES, _ROWS = 4096, 512  # of a tile


class TopClasses(NamedTuple):
    """Of each row the k largest logits, descending, and their classes: both (b_r, k)."""

    logits: Tensor
    classes: Tensor


@torch.no_grad()
def top_classes(
    embeddings: Tensor,
    k: int,
    centres: Tensor,
    bias: Tensor | None,
    logits: Logits,
    first: int,
    comm: Communicator,
    check: Callable[[], None],
) -> TopClasses:
    """The k best of all classes, without a margin; this rank's `centres` are those of the classes `first`, first + 1...

    Collective: 1 handshake, 1 all-gather of embeddings, 2 all-to-alls of k B numbers.
    """
    if isinstance(embeddings, Tensor) and embeddings.is_floating_point():
        embeddings = embeddings.to(centres.dtype)

    def state() -> dict[str, Any]:
        check()
        check_count("k", k, "classes for each row")
        check_features("embeddings", embeddings)
        check_alike("embeddings", embeddings, "centres", flat(centres)[0], rows=False)
        check_directions("embeddings", embeddings)
        check_directions("centres", flat(centres)[0])
        return {"k": k, "rows": len(embeddings), "classes": len(centres)}

    everyone = handshake(comm, state, caller="top_classes", must_match=("k",))
    total = sum(facts["classes"] for facts in everyone)
    if k > total:
        raise ValueError(f"top_classes: k must be at most the number of classes, {total}, got {k}")
    rows = Partition(tuple(facts["rows"] for facts in everyone))
    x = comm.all_gather(embeddings, counts=rows.counts, check=False)
    parts = [_of_some(some, k, centres, bias, logits, first) for some in x.split(_ROWS)] or [_none(x, k)]
    found = (torch.cat(part) for part in zip(*parts, strict=True))
    mine = rows.counts[comm.rank]
    values, classes = (
        comm.all_to_all(part, send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False)
        .view(comm.size, mine, k)
        .transpose(0, 1)
        .flatten(1)
        for part in found
    )
    return _best(values, classes, k)


def _of_some(
    x: Tensor, k: int, centres: Tensor, bias: Tensor | None, logits: Logits, first: int
) -> tuple[Tensor, Tensor]:
    """Of this rank's classes; where it has fewer than k, -inf and -1."""
    x = x.to(accumulation_dtype(x.dtype))
    best = _none(x, k)
    for start, tile in _tiles(torch.nn.functional.normalize(x) if logits.of_unit_embeddings else x, centres, logits):
        tile = logits.margin.s * tile
        if bias is not None:
            tile += bias[start : start + tile.shape[1]]
        values, at = tile.topk(min(k, tile.shape[1]), dim=1)
        best = _best(torch.cat([best[0], values], 1), torch.cat([best[1], at + (first + start)], 1), k)
    return best


def _tiles(x: Tensor, centres: Tensor, logits: Logits) -> Iterator[tuple[int, Tensor]]:
    """Products with some classes' centres, the nearest of each, (b, n), and the first of these classes."""
    for start in range(0, len(centres), _CLASSES):
        some, best_of = flat(centres[start : start + _CLASSES])
        some = some.to(x.dtype)
        some = torch.nn.functional.normalize(some) if logits.of_unit_centres else some
        yield start, (x @ some.T).unflatten(1, (-1, best_of)).amax(2)


def _none(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values = x.new_full((len(x), k), float("-inf"), dtype=accumulation_dtype(x.dtype))
    return values, torch.full((len(x), k), -1, device=x.device)


def _best(values: Tensor, classes: Tensor, k: int) -> TopClasses:
    """The k largest of the columns."""
    order = values.topk(k, dim=1)
    return TopClasses(order.values, classes.gather(1, order.indices))
