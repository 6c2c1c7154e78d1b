"""Cross-entropy of rows: from their statistics, O(B) arithmetic in float64; of pairs in one node where there is one.

With p = softmax over row i's candidates and A, T, M as in `sweep.softmax`,

    one positive, A over the negatives      -log p_i = log(exp A + exp T) - T = softplus(A - T)
    n positives, A over all candidates      -1/n sum_p log p_p = A - T / n
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..comm import LocalCommunicator
from ..contract import Facts
from ..logsumexp import softplus
from ..partition import Diagonal, Partition
from ..sweep import Diagonals, Pairs, Selection
from .kernel_check import random_rows
from .one_tile import has_plain_pairs
from .rehearsals import moderate_scale
from .route import Layout
from .row_statistics import Planned, RowStatistics, Scale
from .softmax_plan import Bounds, Operands

_ROWS, _COLS = ("sum", "target"), ("sum",)
_UNIT = 1.1  # bound of the products of unit rows that are rounded


def pair_losses(
    facts: Facts, scale: Scale, operands: Operands, selection: Selection, bounds: Bounds, *, both: bool
) -> Tensor:
    """Return the cross-entropy of each local row's pair, (b,), in float64. Collective, as `row_statistics`.

    With `both` it is the mean of a pair's cross-entropies in its row and in its column.
    """
    cols = _COLS if both else ()
    return _losses(Planned(facts, scale, operands, selection, bounds, _ROWS, cols, timed=_step))


def view_losses(facts: Facts, scale: Scale, operands: Operands, selection: Selection, bounds: Bounds) -> Tensor:
    """Return the mean cross-entropy of both views of each local example, (b,), in float64. Collective, likewise."""
    call = Planned(facts, scale, operands, selection, bounds, _ROWS, ())
    if (losses := call.losses()) is not None:
        return losses
    side, _ = call.statistics()
    assert side is not None
    assert side.target is not None
    return one_positive(side, side.target).unflatten(0, (2, -1)).mean(0)


def _losses(call: Planned) -> Tensor:
    """Return the cross-entropy of each local row's pair, (b,). Collective."""
    if (losses := call.losses()) is not None:
        return losses
    rows, columns = call.statistics()
    assert rows is not None
    assert rows.target is not None
    losses = one_positive(rows, rows.target)
    return losses if columns is None else (losses + one_positive(columns, rows.target)) / 2


def _step(call: Planned, rows: int, in_kernels: bool) -> Callable[[], None] | None:
    """Return a function that computes the losses of random pairs, forward and backward, on this process alone.

    None: the call has other pairs.
    """
    if not has_plain_pairs(call.facts, call.plan, call.operands.layout):
        return None
    facts, scale_input, like = call.facts, call.scale[1], call.operands
    pairs, size = Partition((rows,)), facts.embedding_size
    number = moderate_scale(size)
    comm = LocalCommunicator()
    by_rank = comm.handshake(lambda: {"memory": facts.options.memory}, caller=facts.caller)
    alone = facts.with_(
        comm=comm, rank=comm.rank, by_rank=by_rank, kernels=in_kernels,
        plans={}, row_numbers=None, deferred=None, assumption=None,
    )  # fmt: skip
    learned = isinstance(scale_input, Tensor) and scale_input.requires_grad
    scale = number, torch.full_like(scale_input, number).requires_grad_() if learned else number
    features = [
        random_rows(rows, size, feature[:0].detach(), seed).requires_grad_(feature.requires_grad)
        for seed, feature in enumerate(like.features)
    ]
    operands = replace(like, features=features, layout=Layout(pairs, pairs))
    selection = Selection(Pairs(Diagonals(Diagonal(0, 0, rows))))

    def run() -> None:
        losses = _losses(Planned(alone, scale, operands, selection, Bounds(_UNIT), *call.fields, rehearses=True))
        if losses.requires_grad:
            losses.mean().backward()

    return run


def one_positive(side: RowStatistics, target: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the cross-entropy of each row's one positive, with logit `target`, against the negatives, (n,)."""
    loss = softplus(side.logsumexp - target)
    return loss if not label_smoothing else loss + label_smoothing * (target - mean_logit([side], target))


def mean_logit(sides: Sequence[RowStatistics], target: Tensor, copies: int = 1) -> Tensor:
    """Return the mean logit of each row, (n,), over the negatives of all sides and `copies` copies of the positive."""
    logits = torch.stack([side.logits for side in sides if side.logits is not None]).sum(0)
    count = torch.stack([side.count for side in sides if side.count is not None]).sum(0)
    return (logits + copies * target) / (count + copies)


def many_positives(side: RowStatistics, positives: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of each row's positives among all candidates, (n,); 0 where it has none.

    The statistics are those over all candidates; the label smoothing is the weight of their mean.
    """
    assert side.target is not None
    mean = side.target / positives.clamp(min=1)
    if label_smoothing:
        assert side.logits is not None
        assert side.count is not None
        mean = (1 - label_smoothing) * mean + label_smoothing * side.logits / side.count.clamp(min=1)
    return torch.where(positives > 0, side.logsumexp - mean, 0.0)


def how_many_equal(ids: Tensor, among: Tensor) -> Tensor:
    """Return the number of ids in `among`, (n,), that equal each of `ids`, (b,): integers, (b,)."""
    ordered, ids = among.sort().values, ids.contiguous()
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)
