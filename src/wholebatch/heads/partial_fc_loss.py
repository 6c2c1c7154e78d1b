r"""Softmax over classes whose centres lie on many ranks: the logits are never stored, on no rank.

    x = embedding / |embedding|,  w_j = centre_j / |centre_j|,  c_ij = x_i . w_j
    N_i = sum_{j != y} exp(s c_ij)            over the classes of all ranks but the example's own
    L_i = log(exp(s phi(c_iy)) + N_i) - s phi(c_iy) = softplus(log N_i - s phi(c_iy))

The centres are the rows of S, which stay; the embeddings are its columns, which travel; of each column the sweep takes
the sum over the negatives, and the target's logit, which the owner of its class has. The margin phi touches one number
of each example, in float64, and so does the large part of the gradient,

    dL_i/dc_iy = -s phi'(c_iy) N_i / (N_i + exp(s phi)),     dL_i/dc_ij = s exp(s c_ij) / (N_i + exp(s phi))

in which no 1 is subtracted from a probability near 1. Both are autograd's, of the softplus.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._checks import check_choice, check_label_smoothing
from .._precision import accumulation_dtype
from ..comm import Communicator, Group
from ..exchange import ExchangeName
from ..losses._cross_entropy import one_positive
from ..losses._door import Agreement, Options, Reduction, agree, eager
from ..losses._softmax import Numbers, softmax_numbers, wanted
from ..losses._towers import UNIT, Towers
from ..partition import Partition
from ..sweep import Memory, NamedRows, Pairs, Selection
from ..sync import Sync
from .angles import target_angles
from .classes import HeldClasses, check_ids, label_range
from .margins import AdaFace, ArcFace, MagFace, Margin, Targets

GRADIENTS = ("exact", "straight_through")


@eager
def partial_fc_loss(
    embeddings: Tensor,
    labels: Tensor,
    centres: Tensor,
    *,
    margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
    margin_grad: str = "exact",
    class_ids: Tensor | None = None,
    num_classes: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    exchange: ExchangeName = "auto",
    memory: Memory = "auto",
) -> Tensor:
    r"""Cross-entropy over the classes of all ranks, with a margin for the example's own, and its exact gradient.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centres

    Args:
        embeddings: (b_r, d), this rank's rows; normalised inside. b_r may differ between ranks and may be 0. float64,
            float32, bfloat16 or float16; of another dtype than the centres', they are cast to that.
        labels: (b_r,) integers, the ids of their classes among all C; ignore_index: the row does not count.
        centres: (C_r, d), this rank's classes; normalised inside. C_r may differ between ranks and may be 0.
        margin: phi and s, such as :class:`wholebatch.ArcFace`.
        margin_grad: "exact", or "straight_through": d phi / d c is taken for 1, as in insightface's code.
        class_ids: (C_r,) ascending integers, the ids of the centres' classes, for a sample of them; every label of the
            batch is among some rank's. None: ranks hold consecutive classes, rank 0's first, and all there are.
        num_classes: C, where it is known: labels must be smaller. None: C is the number of all centres.
        label_smoothing: weight of the mean over all classes at hand, in [0, 1].
        ignore_index: a label that says that there is none.
        weights: (b_r,), >= 0; the mean is sum w_i L_i / sum w_i over the rows that count.
        reduction: "mean" over the rows that count, "sum", or "none": L_i of this rank's rows, (b_r,).
        group: ranks that share the batch and the classes, as in :func:`wholebatch.functional.clip_loss`.
        sync: what an engine does with the embeddings' gradients, as there. The centres' are this rank's own: dL/dW in
            full, whatever `sync` says, and no engine may touch them.
        exchange: how embeddings travel, as there.
        memory: "flat", "auto" or bytes, as there, of this rank's classes times the batch.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.partial_fc_loss` on all embeddings and
        all centres. Its dtype is the centres', float32 for half precision.

    Work: 4 units of B C_r d multiply-adds per rank, 3 where exp(S) is kept. Memory beyond inputs and gradients: two
    tiles, a tile's centres, and on several ranks all embeddings, their gradient and a buffer of the reduce-scatter.

    Collectives (none on one process): forward 1 handshake, 1 all-gather of labels, 1 of embeddings, 1 all-reduce of
    2 B numbers, 2 of one number; backward 1 all-gather of 2 B numbers and 1 reduce-scatter of the embeddings' gradient.
    An :class:`wholebatch.AdaFace` in training: 1 all-gather of norms.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`; also
            labels that are no integers or of no class, an embedding or a centre of norm 0.
        RuntimeError: if the gradient is differentiated again.

    Source: An et al., 2020, arXiv:2010.05222; the margins' papers.

    >>> import torch, wholebatch as wb
    >>> x, centres = torch.eye(3, 4), torch.eye(3, 4, requires_grad=True)
    >>> round(wb.functional.partial_fc_loss(x, torch.arange(3), centres, margin=wb.CosFace(4.0, 0.5)).item(), 4)
    0.2395
    """
    dtype = accumulation_dtype(centres.dtype) if isinstance(centres, Tensor) else torch.float32
    if isinstance(embeddings, Tensor) and embeddings.is_floating_point() and isinstance(centres, Tensor):
        embeddings = embeddings.to(centres.dtype)
    norms: dict[str, Tensor] = {}

    def check() -> dict[str, Any]:
        check_label_smoothing(label_smoothing)
        check_margin(margin, margin_grad)
        check_ids(class_ids)
        with torch.no_grad():
            for name, x in (("embeddings", embeddings), ("centres", centres)):
                norms[name] = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype)
                _check_directions(name, norms[name])
        return {
            "margin": repr(margin),
            "margin_grad": margin_grad,
            "label_smoothing": float(label_smoothing),
            "ignore_index": ignore_index,
            "whether there are class_ids": class_ids is not None,
            "num_classes": num_classes,
            "labels": label_range(labels, ignore_index),
        }

    agreed = agree(
        "partial_fc_loss",
        Options(group, sync, exchange, memory, reduction),
        scalars={},
        features={"embeddings": embeddings, "centres": centres},
        sharded=("centres",),
        ids={"labels": (labels, "embeddings"), "class_ids": (class_ids, "centres")},
        required=("labels",),
        weights=(weights, "embeddings"),
        check=check,
        must_match=("margin", "margin_grad", "label_smoothing", "ignore_index", "num_classes"),
    )
    rows, partition = agreed.rows["embeddings"], agreed.rows["centres"]
    _check_labels(agreed, num_classes, None if class_ids is not None else partition.total)
    everyones, own = agreed.ids("labels"), rows.rows(agreed.rank)
    counts = everyones != ignore_index
    held = HeldClasses(partition, agreed.rank, class_ids)
    at = held.rows_of(everyones)
    held.check_complete(agreed.comm, "partial_fc_loss", at[counts])

    comm = Communicator(agreed.comm.transport, loss="sum")
    x = comm.all_gather(agreed.inputs["embeddings"], counts=rows.counts, check=False)
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=dtype)
    angles, here = target_angles(x, agreed.inputs["centres"], at)
    _, numbers = softmax_numbers(
        agreed,
        (margin.s, margin.s),
        [here, x / lengths],
        towers=Towers(stays=(0,), travels=(1,), stay_norms=norms["centres"]),
        stays=partition,
        travels=Partition((rows.total,)),
        selection=Selection(Pairs(excluded=NamedRows(at))),
        bound=UNIT**2,
        cols=wanted(target=False, mean_logit=label_smoothing > 0),
        everywhere=True,
    )
    assert numbers is not None
    numbers, angles = _of_own_rows(comm, rows, numbers, angles)
    wide = lengths.to(angles)[:, 0]
    targets = Targets(angles, wide[own])
    if isinstance(margin, AdaFace):
        margin.observe(wide[counts])
    phi = margin(targets)
    if margin_grad == "straight_through":
        cosines = angles.cos()
        phi = cosines + (phi - cosines).detach()
    losses = one_positive(numbers, margin.s * phi, label_smoothing=label_smoothing)
    if isinstance(margin, MagFace):
        losses = losses + margin.regulariser(targets)
    counted = counts[own]
    return agreed.reduce(torch.where(counted, losses, 0.0), int(counts.sum()), counted)


def _of_own_rows(comm: Communicator, rows: Partition, numbers: Numbers, angles: Tensor) -> tuple[Numbers, Tensor]:
    """From each rank's numbers of all rows, over its own classes, those of this rank's rows over all classes.

    Collective: 1 all-to-all of 2 B numbers, with label smoothing 4 B; the same in backward.
    """
    parts = [x for x in (numbers.logsumexp, angles, numbers.logits, numbers.count) if x is not None]
    mine = rows.counts[comm.rank]
    found = comm.all_to_all(
        torch.stack(parts, dim=1), send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False
    )
    logsumexp, angle, *others = found.view(comm.size, mine, len(parts)).unbind(2)
    none = logsumexp.isneginf().all(0)  # no negatives at all: the gradient of this is 0, and not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = [x.sum(0) for x in others]
    return Numbers(total, None, *summed) if summed else Numbers(total), angle.sum(0)


def _check_directions(name: str, norms: Tensor) -> None:
    zero = (norms == 0).flatten().nonzero()
    if len(zero):
        raise ValueError(
            f"{name} must not have a row of zeros, which has no direction; row {int(zero[0])} has "
            f"{'one' if len(zero) == 1 else f'one, and {len(zero) - 1} others'}"
        )


def check_margin(margin: object, margin_grad: object) -> None:
    """A margin can be called and has a scale."""
    if not callable(margin) or not isinstance(getattr(margin, "s", None), int | float):
        raise ValueError(f"margin must be one such as wholebatch.ArcFace(), with a scale s; got {margin!r}")
    check_choice("margin_grad", margin_grad, GRADIENTS)


def _check_labels(agreed: Agreement, num_classes: int | None, centres: int | None) -> None:
    """All ranks' labels are those of classes, which are as many as the centres, if those are not a sample."""
    if num_classes is not None and centres is not None and centres != num_classes:
        raise ValueError(
            f"{agreed.caller}: the ranks' centres must be num_classes={num_classes}, got {centres} on ranks with "
            f"{agreed.rows['centres'].counts}"
        )
    total = num_classes if num_classes is not None else centres
    for rank, found in enumerate(agreed.facts("labels")):
        for label in found or ():
            if label < 0 or (total is not None and label >= total):
                raise ValueError(
                    f"{agreed.caller}: labels must lie in [0, {'C' if total is None else total}), or be ignore_index; "
                    f"rank {rank} got {label}"
                )
