"""Find the classes with the largest logits for each embedding, a tile of logits at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.checks import check_alike, check_count, check_features, check_finite, has_feature_dtype
from .._base.normalize import known_norms, normalize_rows
from .._base.precision import accumulation_dtype
from ..comm import Communicator
from ..partition import Partition
from .classes import check_parts
from .logits import OF_HEAD, Logits, check_directions, ends_of, flat

_CLASSES, _ROWS = 4096, 512  # the size of a tile of logits


class TopClasses(NamedTuple):
    """The k largest logits of each row, descending, and their classes: both (b_r, k)."""

    logits: Tensor
    class_ids: Tensor


@torch.no_grad()
def top_classes(
    embeddings: Tensor,
    k: int,
    centers: Tensor,
    bias: Tensor | None,
    first: int,
    logits: Logits,
    comm: Communicator,
    facts: Callable[[], Mapping[str, object]],
) -> TopClasses:
    """Return the k classes with the largest logits, without a margin, for each local row.

    The centers, (C_r, d) or (C_r, K, d), and biases are those of this rank's classes, which are consecutive from
    `first` on. `facts` checks the head, and returns its facts by the names `OF_HEAD`.

    Collective: 1 handshake, 1 all-gather of embeddings, 2 all-to-alls of k B numbers.
    """
    if has_feature_dtype(embeddings):
        embeddings = embeddings.to(centers.dtype)

    def state() -> dict[str, Any]:
        head_facts = facts()
        check_count("k", k, "classes for each row")
        check_features("embeddings", embeddings)
        matrix, _ = flat(centers)
        check_alike("embeddings", embeddings, "centers", matrix, rows=False)
        for name, x in (("embeddings", embeddings), ("centers", matrix)):
            check_directions(name, x, *(end.item() for end in ends_of(known_norms(x))))
        if bias is not None:
            check_finite("bias", bias)
        return {**head_facts, "k": k, "rows": len(embeddings), "classes": len(centers)}

    everyone = comm.handshake(state, caller="top_classes", must_match=(*OF_HEAD, "k"))
    check_parts("top_classes", everyone)
    total = sum(facts["classes"] for facts in everyone)
    if k > total:
        raise ValueError(f"top_classes: k must be at most the number of classes, {total}, got {k}; pass a smaller k")
    rows = Partition(tuple(facts["rows"] for facts in everyone))
    x = comm.all_gather(embeddings, counts=rows.counts, check=False)
    local_best = _best_local_classes(x, k, centers, bias, first, logits)
    num_local = rows.counts[comm.rank]
    values, classes = (
        comm.all_to_all(part, send_counts=rows.counts, receive_counts=(num_local,) * comm.size, check=False)
        .view(comm.size, num_local, k)
        .transpose(0, 1)
        .flatten(1)
        for part in local_best
    )
    return _best(values, classes, k)


def _best_local_classes(
    x: Tensor, k: int, centers: Tensor, bias: Tensor | None, first: int, logits: Logits
) -> TopClasses:
    """Return the best of the local classes, in tiles of classes and rows; -inf and -1 where there are fewer than k."""
    x = x.to(accumulation_dtype(x.dtype))
    x = normalize_rows(x) if logits.unit_embeddings else x
    values = x.new_full((len(x), k), float("-inf"))
    class_ids = torch.full((len(x), k), -1, device=x.device)
    for start in range(0, len(centers), _CLASSES):
        some, best_of = flat(centers[start : start + _CLASSES])
        some = normalize_rows(some.to(x.dtype)) if logits.unit_centers else some.to(x.dtype)
        for row in range(0, len(x), _ROWS):
            rows = slice(row, row + _ROWS)
            tile = logits.margin.s * (x[rows] @ some.T).unflatten(1, (-1, best_of)).amax(2)
            if bias is not None:
                tile += bias[start : start + _CLASSES]
            best, columns = tile.topk(min(k, tile.shape[1]), dim=1)
            values[rows], class_ids[rows] = _best(
                torch.cat([values[rows], best], 1), torch.cat([class_ids[rows], columns + (first + start)], 1), k
            )
    return TopClasses(values, class_ids)


def _best(values: Tensor, classes: Tensor, k: int) -> TopClasses:
    """Return the k columns with the largest values, and their classes."""
    order = values.topk(k, dim=1)
    return TopClasses(order.values, classes.gather(1, order.indices))
