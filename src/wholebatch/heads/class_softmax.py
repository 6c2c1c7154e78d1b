r"""Softmax over classes whose centres lie on many ranks: the logits are never stored, on no rank.

    x = embedding / |embedding|,  w_j = centre_j / |centre_j|,  c_ij = x_i . w_j
    N_i = sum_{j not a class of i} exp(s c_ij)            over the classes of all ranks
    L_i = log(exp(s phi) + N_i) - s phi = softplus(log N_i - s phi),    phi = phi(angle of i and its own centre)

Each rank has all embeddings and its own centres: these are the rows of S, those its columns, and of each column the
sweep takes the sum over the negatives. The angle to an example's own centre comes from the rank that has it (`angles`).
An all-to-all of these two numbers brings each example's together on its own rank, where a margin and a softplus make a
loss of them; autograd goes the same way back. The large part of the gradient touches one number of each example,

    dL_i/dtheta_i = -s phi'(theta_i) N_i / (N_i + exp(s phi)),     dL_i/dc_ij = s exp(s c_ij) / (N_i + exp(s phi))

in which no 1 is subtracted from a probability near 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_alike, check_choice, check_features, check_finite, check_ids, check_label_smoothing
from .._precision import accumulation_dtype
from ..comm import Communicator, handshake
from ..losses._cross_entropy import one_positive
from ..losses._door import Agreement, Options, agree
from ..losses._softmax import Numbers, softmax_numbers, wanted
from ..losses._towers import UNIT, Towers
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from ..sync import scale_gradient, shard_factor
from .angles import target_angles
from .classes import HeldClasses, check_ascending, label_range
from .margins import AdaFace, CurricularFace, MagFace, Margin, Targets

_DRAWN = "sample_rate, unbiased, seed, step and training"
GRADIENTS = ("exact", "straight_through")


@dataclass(frozen=True)
class Sample:
    """A rank's part of the classes of one step.

    Args:
        centres: (K_r, d).
        ids: (K_r,), ascending, of their classes; None: all of them, consecutive.
        log_weights: (K_r,), added to the logits of negatives.
        complete: whether it is known that every label's class is there.
        settings: by which it was drawn, the same on all ranks.
    """

    centres: Tensor
    ids: Tensor | None = None
    log_weights: Tensor | None = None
    complete: bool = False
    settings: Sequence[Any] = ()


def class_softmax(
    caller: str,
    embeddings: Tensor,
    labels: Tensor,
    choose: Callable[[Tensor], Sample],
    *,
    dtype: torch.dtype,
    options: Options,
    margin: Margin,
    margin_grad: str,
    exclude_above: float | None,
    num_classes: int | None,
    label_smoothing: float,
    ignore_index: int,
    weights: Tensor | None,
) -> Tensor:
    """The loss over the classes that are chosen when the labels of all ranks, (B,), are known.

    Two handshakes: of the batch, and of the centres chosen for it.
    """
    if isinstance(embeddings, Tensor) and embeddings.is_floating_point():
        embeddings = embeddings.to(dtype)

    def check() -> dict[str, Any]:
        check_label_smoothing(label_smoothing)
        check_margin(margin, margin_grad)
        check_exclude_above(exclude_above)
        if exclude_above is not None and isinstance(margin, CurricularFace):
            raise ValueError("CurricularFace weighs similar negatives up; with exclude_above they would be left out")
        several = _check_several(labels, ignore_index, num_classes)
        if several > 1 and (label_smoothing or isinstance(margin, CurricularFace)):
            raise ValueError("several labels for each example go neither with label_smoothing nor with CurricularFace")
        check_directions("embeddings", embeddings)
        return {
            "margin": _told(margin),
            "margin_grad": margin_grad,
            "exclude_above": exclude_above,
            "label_smoothing": float(label_smoothing),
            "ignore_index": ignore_index,
            "num_classes": num_classes,
            "labels": label_range(labels, ignore_index),
            "labels of an example": several,
        }

    agreed = agree(
        caller,
        options,
        scalars={},
        features={"embeddings": embeddings},
        ids={"labels": (labels[:, 0] if isinstance(labels, Tensor) and labels.dim() == 2 else labels, "embeddings")},
        required=("labels",),
        weights=(weights, "embeddings"),
        check=check,
        must_match=(
            *("margin", "margin_grad", "exclude_above", "label_smoothing", "ignore_index", "num_classes"),
            "labels of an example",
        ),
    )
    if num_classes is not None:
        _check_labels(agreed, num_classes)
    rows, comm = agreed.rows["embeddings"], Communicator(agreed.comm.transport, loss="sum")
    own = rows.rows(agreed.rank)
    slots = labels.shape[1] if labels.dim() == 2 else 1
    everyones = agreed.gathered(labels.to(agreed.device, torch.int64).reshape(len(labels), slots), rows)
    counts = everyones != ignore_index
    sample, partition, norms = _agree_on_centres(agreed, lambda: choose(everyones), num_classes)
    if num_classes is None and sample.ids is None:
        _check_labels(agreed, partition.total)
    held = HeldClasses(partition, agreed.rank, sample.ids)
    at = held.rows_of(everyones)
    if not sample.complete:
        held.check_complete(comm, caller, at[counts])

    x = comm.all_gather(agreed.inputs["embeddings"], counts=rows.counts, check=False)
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=agreed.dtype)
    whole = options.reduction != "none"
    centres = scale_gradient(sample.centres, shard_factor(options.sync, comm.size, whole=whole))
    angles, centres = target_angles(x, centres, at)
    bend = None
    if isinstance(margin, CurricularFace):
        everyones_angles = comm.all_reduce(angles.detach(), check=False)
        margin.observe(everyones_angles[counts])
        bend = margin.of_negatives(everyones_angles)
    ceiling = None
    if exclude_above is not None:
        ceiling = norms.new_full((len(norms),), margin.s * exclude_above)
        if sample.log_weights is not None:
            ceiling += sample.log_weights
    _, numbers = softmax_numbers(
        agreed,
        (margin.s, margin.s),
        [centres, x / lengths],
        towers=Towers(stays=(0,), travels=(1,), stay_norms=norms),
        stays=partition,
        travels=Partition((rows.total,)),
        selection=Selection(Pairs(excluded=NamedRows(at)), ceiling=ceiling, bend=bend, offsets=sample.log_weights),
        bound=UNIT**2 if bend is None else UNIT**2 * (1 + abs(bend.t)),
        cols=wanted(target=False, mean_logit=label_smoothing > 0),
        everywhere=True,
    )
    assert numbers is not None
    numbers, angles = _of_own_rows(comm, rows, numbers, angles)
    wide = lengths.to(angles)[:, 0]
    targets = Targets(angles, wide[own, None])
    if isinstance(margin, AdaFace):
        margin.observe(wide[counts.any(1)])
    phi = margin(targets)
    if margin_grad == "straight_through":
        cosines = angles.cos()
        phi = cosines + (phi - cosines).detach()
    losses = torch.stack(
        [one_positive(numbers, margin.s * of_label, label_smoothing=label_smoothing) for of_label in phi.unbind(1)], 1
    )
    if isinstance(margin, MagFace):
        losses = losses + margin.regulariser(targets)
    labelled = counts[own]
    losses = torch.where(labelled, losses, 0.0).sum(1) / labelled.sum(1).clamp(min=1)
    return agreed.reduce(losses, int(counts.any(1).sum()), labelled.any(1))


def _of_own_rows(comm: Communicator, rows: Partition, numbers: Numbers, angles: Tensor) -> tuple[Numbers, Tensor]:
    """From each rank's numbers of all rows, over its own classes, those of this rank's rows over all classes.

    Collective: 1 all-to-all of 2 B numbers, with label smoothing 4 B; the same in backward.
    """
    parts = [x for x in (numbers.logsumexp, numbers.logits, numbers.count) if x is not None] + [*angles.unbind(1)]
    mine = rows.counts[comm.rank]
    found = comm.all_to_all(
        torch.stack(parts, dim=1), send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False
    )
    logsumexp, *others = found.view(comm.size, mine, len(parts)).unbind(2)
    none = logsumexp.isneginf().all(0)  # no negatives at all: the gradient of this is 0, and not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = [x.sum(0) for x in others]
    of_labels = torch.stack(summed[-angles.shape[1] :], 1)
    return Numbers(total, None, *summed[: -angles.shape[1]]), of_labels


def _agree_on_centres(
    agreed: Agreement, choose: Callable[[], Sample], num_classes: int | None
) -> tuple[Sample, Partition, Tensor]:
    """The classes of this rank, how many each rank has, and its centres' norms, (K_r, 1). Collective: 1 handshake."""
    chosen: list[tuple[Sample, Tensor]] = []

    def state() -> dict[str, Any]:
        sample = choose()
        check_features("centres", sample.centres)
        check_alike("embeddings", agreed.inputs["embeddings"], "centres", sample.centres, rows=False)
        if sample.ids is not None:
            check_ids("class_ids", sample.ids, "centres", len(sample.centres))
            check_ascending(sample.ids)
        if sample.log_weights is not None and sample.log_weights.shape != sample.centres.shape[:1]:
            raise ValueError(
                f"log_weights must have shape ({len(sample.centres)},), one for each of the centres, got "
                f"{tuple(sample.log_weights.shape)}"
            )
        chosen.append((sample, check_directions("centres", sample.centres)))
        return {
            "centres": len(sample.centres),
            "whether there are class_ids": sample.ids is not None,
            "whether the centres need a gradient": sample.centres.requires_grad,
            _DRAWN: [*sample.settings],
        }

    everyone = handshake(
        agreed.comm,
        state,
        caller=agreed.caller,
        must_match=(_DRAWN, "whether there are class_ids", "whether the centres need a gradient"),
    )
    sample, norms = chosen[0]
    partition = Partition(tuple(facts["centres"] for facts in everyone))
    if sample.ids is None and num_classes is not None and partition.total != num_classes:
        raise ValueError(
            f"{agreed.caller}: the ranks' centres must be num_classes={num_classes}, got {partition.total} on ranks "
            f"with {partition.counts}"
        )
    return sample, partition, norms


@torch.no_grad()
def check_directions(name: str, x: Tensor) -> Tensor:
    """No row of x is NaN, infinite or 0; returns their norms, (n, 1)."""
    norms = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=accumulation_dtype(x.dtype))
    if not norms.isfinite().all():
        check_finite(name, x)
    zero = (norms == 0).flatten().nonzero()
    if len(zero):
        raise ValueError(
            f"{name} must not have a row of zeros, which has no direction; row {int(zero[0])} has "
            f"{'one' if len(zero) == 1 else f'one, and {len(zero) - 1} others'}"
        )
    return norms


def _check_several(labels: object, ignore_index: int, num_classes: int | None) -> int:
    """How many labels an example may have; none has one twice."""
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return 1
    if not labels.shape[1]:
        raise ValueError(f"labels must have shape (rows,) or (rows, k), k >= 1, got {tuple(labels.shape)}")
    ordered = labels.sort(1).values
    if bool(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != ignore_index)).any()):
        raise ValueError(
            "the labels of an example must be different ones, filled up with ignore_index; of one-hot rows pass the "
            "argmax"
        )
    if num_classes is not None and labels.shape[1] >= num_classes:
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} say that an example may have {labels.shape[1]} of {num_classes} "
            "classes, which leaves no negatives; of one-hot rows pass the argmax"
        )
    return labels.shape[1]


def check_exclude_above(cosine: object) -> None:
    """A cosine, or None."""
    if cosine is not None and not (isinstance(cosine, int | float) and -1.0 <= cosine <= 1.0):
        raise ValueError(f"exclude_above must be a cosine from -1 to 1, or None; got {cosine!r}")


def _told(margin: Margin) -> str:
    """What ranks compare: settings, where the margin shows them; of your own, at least its type."""
    return repr(margin) if is_dataclass(margin) or isinstance(margin, nn.Module) else type(margin).__qualname__


def check_margin(margin: object, margin_grad: object) -> None:
    """A margin can be called and has a scale."""
    if not callable(margin) or not isinstance(getattr(margin, "s", None), int | float):
        raise ValueError(f"margin must be one such as wholebatch.ArcFace(), with a scale s; got {margin!r}")
    check_choice("margin_grad", margin_grad, GRADIENTS)


def _check_labels(agreed: Agreement, classes: int) -> None:
    """All ranks' labels are those of classes."""
    for rank, found in enumerate(agreed.facts("labels")):
        for label in found or ():
            if not 0 <= label < classes:
                raise ValueError(
                    f"{agreed.caller}: labels must lie in [0, {classes}), or be ignore_index; rank {rank} got {label}"
                )
