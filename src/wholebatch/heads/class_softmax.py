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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import check_alike, check_finite, check_ids
from ..comm import Communicator, handshake
from ..losses._cross_entropy import one_positive
from ..losses._door import Agreement, Options, agree
from ..losses._softmax import Numbers, softmax_numbers, wanted
from ..losses._towers import UNIT, Towers
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from ..sync import scale_gradient, shard_factor
from .angles import nearest, target_angles
from .classes import HeldClasses, check_ascending, label_range, rows_of_groups
from .logits import Logits, check_directions, check_labels, check_several, flat
from .margins import AdaFace, CurricularFace, MagFace, Targets

_DRAWN = "sample_rate, unbiased, seed, step and training"
_OF_CENTRES = (
    "whether there are class_ids",
    "whether the centres need a gradient",
    "sub-centres of a class",
    "whether there is a bias",
)


@dataclass(frozen=True)
class Sample:
    """A rank's part of the classes of one step.

    Args:
        centres: (K_r, d), or (K_r, K, d): K sub-centres of each class.
        ids: (K_r,), ascending, of their classes; None: all of them, consecutive.
        bias: (K_r,), added to the logits.
        log_weights: (K_r,), added to the logits of negatives.
        complete: whether it is known that every label's class is there.
        settings: by which it was drawn, the same on all ranks.
    """

    centres: Tensor
    ids: Tensor | None = None
    bias: Tensor | None = None
    log_weights: Tensor | None = None
    complete: bool = False
    settings: Sequence[Any] = ()


def class_softmax(
    caller: str,
    embeddings: Tensor,
    labels: Tensor,
    choose: Callable[[Tensor], Sample],
    logits: Logits,
    *,
    dtype: torch.dtype,
    options: Options,
    num_classes: int | None,
    weights: Tensor | None,
) -> Tensor:
    """The loss over the classes that are chosen when the labels of all ranks, (B,), are known.

    Two handshakes: of the batch, and of the centres chosen for it.
    """
    if isinstance(embeddings, Tensor) and embeddings.is_floating_point():
        embeddings = embeddings.to(dtype)
    margin, ignore_index = logits.margin, logits.ignore_index

    def check() -> dict[str, Any]:
        logits.check()
        several = check_several(labels, ignore_index, num_classes)
        if several > 1 and (logits.label_smoothing or isinstance(margin, CurricularFace)):
            raise ValueError("several labels for each example go neither with label_smoothing nor with CurricularFace")
        check_directions("embeddings", embeddings)
        return {
            **logits.facts(),
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
            *("margin", "margin_grad", "normalise", "exclude_above", "label_smoothing", "ignore_index", "num_classes"),
            "labels of an example",
        ),
    )
    if num_classes is not None:
        check_labels(agreed, num_classes)
    rows, comm = agreed.rows["embeddings"], Communicator(agreed.comm.transport, loss="sum")
    own = rows.rows(agreed.rank)
    slots = labels.shape[1] if labels.dim() == 2 else 1
    everyones = agreed.gathered(labels.to(agreed.device, torch.int64).reshape(len(labels), slots), rows)
    counts = everyones != ignore_index
    sample, partition, norms = _agree_on_centres(agreed, lambda: choose(everyones), logits, num_classes)
    if num_classes is None and sample.ids is None:
        check_labels(agreed, partition.total)
    held = HeldClasses(partition, agreed.rank, sample.ids)
    at = held.rows_of(everyones)
    if not sample.complete:
        held.check_complete(comm, caller, at[counts])

    x = comm.all_gather(agreed.inputs["embeddings"], counts=rows.counts, check=False)
    lengths = torch.linalg.vector_norm(x, dim=1, keepdim=True, dtype=agreed.dtype)
    factor = shard_factor(options.sync, comm.size, whole=options.reduction != "none")
    centres, best_of = flat(scale_gradient(sample.centres, factor))
    subrows = rows_of_groups(at, best_of)
    bias = None if sample.bias is None else scale_gradient(sample.bias, factor)
    angles, target_lengths, centres = target_angles(x, centres, nearest(x, centres, subrows))
    of_targets = [angles]  # what else an own class's logit is made of
    if not logits.of_unit_centres:
        of_targets.append(target_lengths)
    if bias is not None:
        of_targets.append(torch.cat([bias, bias.new_zeros(1)])[at])  # NOT_HERE is the last
    bend = None
    if isinstance(margin, CurricularFace):
        everyones_angles = comm.all_reduce(angles.detach(), check=False)
        margin.observe(everyones_angles[counts])
        bend = margin.of_negatives(everyones_angles)
    offsets = _sum(bias, sample.log_weights)
    if offsets is not None:
        offsets = offsets.repeat_interleave(best_of)
    ceiling = None
    if logits.exclude_above is not None:
        ceiling = norms.new_full((len(norms),), margin.s * logits.exclude_above)
        if offsets is not None:
            ceiling += offsets.detach()
    bound = UNIT**2 if bend is None else UNIT**2 * (1 + abs(bend.t))
    for of_unit, of in ((logits.of_unit_embeddings, lengths), (logits.of_unit_centres, norms)):
        bound *= 1.0 if of_unit else float(of.detach().amax()) if len(of) else 0.0
    _, numbers = softmax_numbers(
        agreed,
        (margin.s, margin.s),
        [centres, x / lengths if logits.of_unit_embeddings else x],
        towers=Towers(stays=(0,), travels=(1,), stay_norms=norms if logits.of_unit_centres else None),
        stays=Partition(tuple(best_of * count for count in partition.counts)),
        travels=Partition((rows.total,)),
        selection=Selection(
            Pairs(excluded=NamedRows(subrows.flatten(1))), ceiling=ceiling, bend=bend, offsets=offsets, best_of=best_of
        ),
        bound=bound,
        cols=wanted(target=False, mean_logit=logits.label_smoothing > 0),
        everywhere=True,
    )
    assert numbers is not None
    numbers, angles, *factors = _of_own_rows(comm, rows, numbers, of_targets)
    wide = lengths.to(angles)[:, 0]
    targets = Targets(angles, wide[own, None])
    if isinstance(margin, AdaFace):
        margin.observe(wide[counts.any(1)])
    phi = margin(targets)
    if logits.margin_grad == "straight_through":
        cosines = angles.cos()
        phi = cosines + (phi - cosines).detach()
    of_labels = margin.s * phi
    if not logits.of_unit_embeddings:
        of_labels = of_labels * targets.norms
    if not logits.of_unit_centres:
        of_labels = of_labels * factors.pop(0)
    if bias is not None:
        of_labels = of_labels + factors.pop(0)
    smoothing = logits.label_smoothing
    losses = torch.stack([one_positive(numbers, z, label_smoothing=smoothing) for z in of_labels.unbind(1)], 1)
    if isinstance(margin, MagFace):
        losses = losses + margin.regulariser(targets)
    labelled = counts[own]
    losses = torch.where(labelled, losses, 0.0).sum(1) / labelled.sum(1).clamp(min=1)
    return agreed.reduce(losses, int(counts.any(1).sum()), labelled.any(1))


def _of_own_rows(comm: Communicator, rows: Partition, numbers: Numbers, of_targets: list[Tensor]) -> tuple[Any, ...]:
    """From each rank's numbers of all rows, over its own classes, those of this rank's rows over all classes.

    Args:
        comm: the ranks.
        rows: whose each is.
        numbers: of the negatives.
        of_targets: each (B, k), 0 where the class is another rank's.

    Returns:
        The same, of this rank's rows. Collective: 1 all-to-all of 2 B numbers, with label smoothing 4 B, and of B more
        for all but the first of `of_targets`; the same in backward.
    """
    of_negatives = [x for x in (numbers.logsumexp, numbers.logits, numbers.count) if x is not None]
    parts = of_negatives + [column.to(of_negatives[0]) for x in of_targets for column in x.unbind(1)]
    mine = rows.counts[comm.rank]
    found = comm.all_to_all(
        torch.stack(parts, dim=1), send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False
    )
    logsumexp, *rest = found.view(comm.size, mine, len(parts)).unbind(2)
    none = logsumexp.isneginf().all(0)  # no negatives at all: the gradient of this is 0, and not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = [x.sum(0) for x in rest]
    others, of_labels = summed[: len(of_negatives) - 1], summed[len(of_negatives) - 1 :]
    slots = len(of_labels) // len(of_targets)
    each = [torch.stack(of_labels[first : first + slots], 1) for first in range(0, len(of_labels), slots)]
    return Numbers(total, None, *others), *each


def _agree_on_centres(
    agreed: Agreement, choose: Callable[[], Sample], logits: Logits, num_classes: int | None
) -> tuple[Sample, Partition, Tensor]:
    """The classes of this rank, how many each rank has, and its centres' norms, (K_r K, 1). Collective: 1 handshake."""
    chosen: list[tuple[Sample, Tensor]] = []

    def state() -> dict[str, Any]:
        sample = choose()
        matrix, best_of = flat(sample.centres)
        logits.check_sub_centres(best_of)
        check_alike("embeddings", agreed.inputs["embeddings"], "centres", matrix, rows=False)
        if sample.ids is not None:
            check_ids("class_ids", sample.ids, "centres", len(sample.centres))
            check_ascending(sample.ids)
        for name, x in (("log_weights", sample.log_weights), ("bias", sample.bias)):
            if x is not None and (not isinstance(x, Tensor) or x.shape != sample.centres.shape[:1]):
                raise ValueError(
                    f"{name} must have shape ({len(sample.centres)},), one for each of the classes, got "
                    f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
                )
            if x is not None:
                check_finite(name, x)
        chosen.append((sample, check_directions("centres", matrix)))
        each = (sample.ids is not None, sample.centres.requires_grad, best_of, sample.bias is not None)
        return {
            "centres": len(sample.centres),
            **dict(zip(_OF_CENTRES, each, strict=True)),
            _DRAWN: [*sample.settings],
        }

    everyone = handshake(
        agreed.comm,
        state,
        caller=agreed.caller,
        must_match=(_DRAWN, *_OF_CENTRES),
    )
    sample, norms = chosen[0]
    partition = Partition(tuple(facts["centres"] for facts in everyone))
    if sample.ids is None and num_classes is not None and partition.total != num_classes:
        raise ValueError(
            f"{agreed.caller}: the ranks' centres must be num_classes={num_classes}, got {partition.total} on ranks "
            f"with {partition.counts}"
        )
    return sample, partition, norms


def _sum(*parts: Tensor | None) -> Tensor | None:
    """Of those that there are."""
    found = [x for x in parts if x is not None]
    return torch.stack(found).sum(0) if found else None
