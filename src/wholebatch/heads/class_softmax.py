r"""Softmax over classes whose centers lie on many ranks: the logits are never stored, on no rank.

    x = embedding / |embedding|,  w_j = center_j / |center_j|,  c_ij = x_i . w_j
    N_i = sum_{j not a class of i} exp(s c_ij)            over the classes of all ranks
    L_i = log(exp(s phi) + N_i) - s phi = softplus(log N_i - s phi),    phi = phi(angle of i and its own center)

Each rank has all embeddings and its own centers: these are the rows of S, those its columns, and of each column the
sweep takes the sum over the negatives. The angle to an example's own center comes from the rank that has it (`angles`).
An all-to-all of these two numbers brings each example's together on its own rank, where a margin and a softplus make a
loss of them; autograd goes the same way back. The large part of the gradient touches one number of each example,

    dL_i/dtheta_i = -s phi'(theta_i) N_i / (N_i + exp(s phi)),     dL_i/dc_ij = s exp(s c_ij) / (N_i + exp(s phi))

in which no 1 is subtracted from a probability near 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._checks import (
    check_alike,
    check_count,
    check_dense,
    check_ids,
    check_norm,
    has_feature_dtype,
    is_dense,
    norm_bound,
    on_host,
)
from .._normalize import UNIT, known_norms, normalize_rows, row_norms
from ..comm import Communicator
from ..kernels import in_triton
from ..losses._cross_entropy import one_positive
from ..losses._door import Agreement, Options, agree
from ..losses._softmax import Numbers, softmax_numbers, wanted
from ..losses._towers import Towers
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from ..sync import scale_gradient, shard_factor
from .angles import nearest, target_angles
from .classes import HeldClasses, check_ascending, label_range, out_of_order, rows_of_groups
from .logits import (
    SETTINGS,
    Logits,
    check_different,
    check_directions,
    check_labels,
    check_several,
    ends_of,
    flat,
    repeated,
)
from .margins import AdaFace, CurricularFace, HardNegatives, MagFace, Targets

_DRAWN = "sample_rate, unbiased, seed, step and training"
_OF_CENTERS = (
    "whether there are class_ids",
    "whether the centers need a gradient",
    "sub-centers of a class",
    "whether there is a bias",
)


@dataclass(frozen=True)
class Sample:
    """A rank's part of the classes of one step.

    Args:
        centers: (K_r, d), or (K_r, K, d): K sub-centers of each class.
        ids: (K_r,), ascending, of their classes; None: all of them, consecutive.
        bias: (K_r,), added to the logits.
        log_weights: (K_r,), added to the logits of negatives.
        complete: whether it is known that every label's class is there.
        settings: by which it was drawn, the same on all ranks.
    """

    centers: Tensor
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

    Two handshakes: of the batch, and of the centers chosen for it.
    """
    agreed, everyones = _agree_on_batch(
        caller, embeddings, labels, logits, dtype=dtype, options=options, num_classes=num_classes, weights=weights
    )
    counts = everyones != logits.ignore_index
    sample, partition, norms, (longest, largest_offset) = _agree_on_centers(
        agreed, lambda: choose(everyones), logits, num_classes
    )
    held = HeldClasses(partition, agreed.rank, sample.ids)
    at = held.rows_of(everyones)
    rows, comm = agreed.rows["embeddings"], Communicator(agreed.comm.transport, loss="sum")
    if not sample.complete:
        held.check_complete(comm, caller, at, counts)

    x = comm.all_gather(agreed.inputs["embeddings"], counts=rows.counts, check=False)
    factor = shard_factor(options.sync, comm.size, whole=options.reduction != "none")
    centers, best_of = flat(scale_gradient(sample.centers, factor))
    agreed = agreed.in_range(longest)
    # Two gradients meet in each of them. Embeddings are few, and are widened; centers only where the range is small.
    narrow = agreed.features_dtype == torch.float16
    x, centers = x.to(agreed.dtype), centers.to(agreed.dtype if narrow else agreed.features_dtype)
    lengths = row_norms(x)
    # Of many rows one bias gets a gradient from each: half precision would not hold the sum.
    bias = None if sample.bias is None else scale_gradient(sample.bias, factor).to(agreed.dtype)
    places = rows_of_groups(at, best_of)
    own_centers = nearest(x, centers, places, clamp=logits.clamp)
    angles, target_lengths, centers = target_angles(x, centers, own_centers, clamp=logits.clamp)
    bend, margin = None, logits.margin
    if isinstance(margin, CurricularFace):
        everyones_angles = comm.all_reduce(angles.detach(), check=False)
        margin.observe(everyones_angles[counts])
        bend = margin.of_negatives(everyones_angles)
    numbers = _negatives(
        agreed,
        logits,
        Shards(centers, norms, longest, partition, best_of, _sum(bias, sample.log_weights), largest_offset),
        x,
        lengths,
        target_rows=places,
        bend=bend,
    )

    of_targets = {"angles": angles}  # and what else an own class's logit is made of
    if not logits.of_unit_centers:
        of_targets["lengths"] = target_lengths
    if bias is not None:
        of_targets["bias"] = torch.cat([bias, bias.new_zeros(1)])[at]  # the last is for those that are NOT_HERE
    numbers, of_targets = _of_own_rows(comm, rows, numbers, of_targets)
    local, wide = rows.rows(agreed.rank), lengths.to(angles)[:, 0]
    if isinstance(margin, AdaFace):
        margin.observe(wide[counts.any(1)])
    targets = Targets(of_targets["angles"], wide[local, None])
    of_labels = logits.of_targets(targets, of_targets.get("lengths"), of_targets.get("bias"))
    smoothing = logits.label_smoothing
    losses = torch.stack([one_positive(numbers, z, label_smoothing=smoothing) for z in of_labels.unbind(1)], 1)
    if isinstance(margin, MagFace):
        losses = losses + margin.regularizer(targets)
    labeled = counts[local]
    losses = torch.where(labeled, losses, 0.0).sum(1) / labeled.sum(1).clamp(min=1)
    return agreed.reduce(losses, counts.any(1).sum(), labeled.any(1))


@dataclass(frozen=True)
class Shards:
    """The rows of S: this rank's part of all centers.

    Args:
        centers: (K_r K, d), of any length, sub-centers one below the other.
        norms: (K_r K, 1), theirs.
        longest: no norm is larger.
        partition: how many classes each rank has.
        best_of: K, sub-centers of a class.
        offsets: (K_r,), added to the logits of these classes, or None.
        largest_offset: no offset is larger, nor its negative.
    """

    centers: Tensor
    norms: Tensor
    longest: float
    partition: Partition
    best_of: int
    offsets: Tensor | None
    largest_offset: float


def _negatives(
    agreed: Agreement,
    logits: Logits,
    shards: Shards,
    x: Tensor,
    lengths: Tensor,
    *,
    target_rows: Tensor,
    bend: HardNegatives | None,
) -> Numbers:
    """The numbers of all embeddings, (B, d), over this rank's classes but for an embedding's own, (B, k, K)."""
    s, best_of, offsets, ceiling = logits.margin.s, shards.best_of, shards.offsets, None
    if offsets is not None:
        offsets = offsets.repeat_interleave(best_of)
    if logits.exclude_above is not None:
        ceiling = torch.full_like(shards.norms[:, 0], s * logits.exclude_above)
        if offsets is not None:
            ceiling += offsets.detach()
    bound = UNIT**2 if bend is None else UNIT**2 * (1 + abs(bend.t))
    if not logits.of_unit_embeddings:
        bound *= agreed.norms["embeddings"]
    if not logits.of_unit_centers:
        bound *= shards.longest
    stay_norms, travel_norms = shards.norms if logits.of_unit_centers else None, None
    if logits.of_unit_embeddings:
        if in_triton(agreed.options.kernel):  # multiplied in the precision that they have
            travel_norms = lengths.detach()
        else:
            x = normalize_rows(x)
    _, numbers = softmax_numbers(
        agreed,
        (s, s),
        [shards.centers, x],
        towers=Towers(stays=(0,), travels=(1,), stay_norms=stay_norms, travel_norms=travel_norms),
        stays=Partition(tuple(best_of * count for count in shards.partition.counts)),
        travels=Partition((len(x),)),
        selection=Selection(
            Pairs(excluded=NamedRows(target_rows.flatten(1))),
            ceiling=ceiling,
            bend=bend,
            offsets=offsets,
            best_of=best_of,
        ),
        bound=bound,
        cols=wanted(target=False, mean_logit=logits.label_smoothing > 0),
        everywhere=True,
        largest_offset=shards.largest_offset,
    )
    assert numbers is not None
    return numbers


def _of_own_rows(
    comm: Communicator, rows: Partition, numbers: Numbers, of_targets: dict[str, Tensor]
) -> tuple[Numbers, dict[str, Tensor]]:
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
    parts = [x[:, None] for x in of_negatives] + [x.to(of_negatives[0]) for x in of_targets.values()]
    mine, widths = rows.counts[comm.rank], [x.shape[1] for x in parts]
    found = comm.all_to_all(
        torch.cat(parts, dim=1), send_counts=rows.counts, receive_counts=(mine,) * comm.size, check=False
    )
    each = found.view(comm.size, mine, sum(widths)).split(widths, dim=2)
    logsumexp, *others = (x[..., 0] for x in each[: len(of_negatives)])
    none = logsumexp.isneginf().all(0)  # no negatives at all: the gradient of this is 0, and not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = {name: x.sum(0) for name, x in zip(of_targets, each[len(of_negatives) :], strict=True)}
    return Numbers(total, None, *(x.sum(0) for x in others)), summed


def _agree_on_batch(
    caller: str,
    embeddings: Tensor,
    labels: Tensor,
    logits: Logits,
    *,
    dtype: torch.dtype,
    options: Options,
    num_classes: int | None,
    weights: Tensor | None,
) -> tuple[Agreement, Tensor]:
    """What the ranks agree on, and the labels of all, (B, k). Collective: 1 handshake, 1 all-gather of the labels."""
    if has_feature_dtype(embeddings):
        embeddings = embeddings.to(dtype)

    def check() -> dict[str, Any]:
        logits.check()
        if num_classes is not None:
            check_count("num_classes", num_classes, "classes of all ranks")
        several = check_several(labels, num_classes)
        if several > 1 and (logits.label_smoothing or isinstance(logits.margin, CurricularFace)):
            raise ValueError("several labels for each example go neither with label_smoothing nor with CurricularFace")
        return {**logits.facts(), "num_classes": num_classes, "labels of an example": several}

    def see() -> dict[str, Tensor]:
        of_labels = dict(zip(("smallest", "largest"), label_range(labels, logits.ignore_index), strict=True))
        if labels.dim() == 2:
            of_labels["repeated"] = repeated(labels, logits.ignore_index)
        return {**of_labels, **dict(zip(("shortest", "longest"), ends_of(known_norms(embeddings)), strict=True))}

    def judge(seen: Mapping[str, float]) -> dict[str, Any]:
        check_different(seen.get("repeated", 0.0))
        check_directions("embeddings", embeddings, seen["shortest"], seen["longest"])
        ends = int(seen["smallest"]), int(seen["largest"])
        return {"labels": ends if ends[0] <= ends[1] else None}

    several = is_dense(labels) and labels.dim() == 2 and labels.shape[1] > 0
    agreed = agree(
        caller,
        options,
        scalars={},
        features={"embeddings": embeddings},
        ids={"labels": (labels[:, 0] if several else labels, "embeddings")},
        required=("labels",),
        weights=(weights, "embeddings"),
        check=check,
        see=see,
        judge=judge,
        must_match=(*SETTINGS, "num_classes", "labels of an example"),
    )
    if num_classes is not None:
        check_labels(agreed, num_classes)
    columns = labels.to(agreed.device, torch.int64).reshape(len(labels), labels.shape[1] if several else 1)
    return agreed, agreed.gathered(columns, agreed.rows["embeddings"])


def _agree_on_centers(
    agreed: Agreement, choose: Callable[[], Sample], logits: Logits, num_classes: int | None
) -> tuple[Sample, Partition, Tensor, tuple[float, float]]:
    """The classes of this rank, how many each rank has, and its centers' norms, (K_r K, 1). Collective: 1 handshake.

    And the largest of these norms, and the largest offset of this rank's logits.
    """
    chosen: list[tuple[Sample, Tensor, tuple[float, float]]] = []

    def state() -> dict[str, Any]:
        sample = choose()
        matrix, best_of = flat(sample.centers)
        logits.check_sub_centers(best_of)
        embeddings = agreed.inputs["embeddings"].to(agreed.given_dtype)
        check_alike("embeddings", embeddings, "centers", matrix, rows=False)
        if sample.ids is not None:
            check_ids("class_ids", sample.ids, "centers", len(sample.centers))
        for name, x in (("log_weights", sample.log_weights), ("bias", sample.bias)):
            if isinstance(x, Tensor):
                check_dense(name, x)
            if x is not None and (not isinstance(x, Tensor) or x.shape != sample.centers.shape[:1]):
                raise ValueError(
                    f"{name} must have shape ({len(sample.centers)},), one for each of the classes, got "
                    f"{tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}"
                )
            if x is not None and not x.is_floating_point():
                raise ValueError(f"{name} must be floating-point, got {x.dtype}")
        for name, x in (("log_weights", sample.log_weights), ("bias", sample.bias), ("class_ids", sample.ids)):
            if x is not None and x.device != sample.centers.device:
                raise ValueError(f"{name} must be on the centers' device, {sample.centers.device}, got {x.device}")
        of_centers = (sample.centers, sample.bias, sample.log_weights)
        if torch.is_grad_enabled() and any(x is not None and x.is_inference() for x in of_centers):
            raise ValueError(
                "centers, bias and log_weights must not be made under torch.inference_mode() where gradients are "
                "enabled; pass x.clone()"
            )
        norms, offsets = known_norms(matrix), _sum(sample.bias, sample.log_weights)
        seen = dict(zip(("shortest", "longest"), ends_of(norms), strict=True))
        if offsets is not None:
            seen["offset"] = norm_bound(offsets[:, None])
        if sample.ids is not None:
            seen["out of order"] = out_of_order(sample.ids)
        found = on_host(seen)  # in one look
        check_directions("centers", matrix, found["shortest"], found["longest"])
        check_ascending(found.get("out of order", 0.0))
        for name, x in (("log_weights", sample.log_weights), ("bias", sample.bias)):
            if x is not None:
                check_norm(name, x, found["offset"])
        chosen.append((sample, norms, (found["longest"], found.get("offset", 0.0))))
        each = (sample.ids is not None, sample.centers.requires_grad, best_of, sample.bias is not None)
        return {
            "centers": len(sample.centers),
            **dict(zip(_OF_CENTERS, each, strict=True)),
            _DRAWN: [*sample.settings],
        }

    everyone = agreed.comm.handshake(state, caller=agreed.caller, must_match=(_DRAWN, *_OF_CENTERS))
    sample, norms, largest = chosen[0]
    partition = Partition(tuple(facts["centers"] for facts in everyone))
    if sample.ids is None and num_classes is not None and partition.total != num_classes:
        raise ValueError(
            f"{agreed.caller}: the ranks' centers must be num_classes={num_classes}, got {partition.total} on ranks "
            f"with {partition.counts}"
        )
    if num_classes is None and sample.ids is None:
        check_labels(agreed, partition.total)
    return sample, partition, norms, largest


def _sum(*parts: Tensor | None) -> Tensor | None:
    """Of those that there are."""
    found = [x for x in parts if x is not None]
    return sum(found[1:], start=found[0]) if found else None
