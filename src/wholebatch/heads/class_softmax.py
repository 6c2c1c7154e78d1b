r"""Softmax over classes whose centers are sharded over the ranks; no rank stores the logits.

    x = embedding / |embedding|,  w_j = center_j / |center_j|,  c_ij = x_i . w_j
    N_i = sum_{j not a class of i} exp(s c_ij)            over the classes of all ranks
    L_i = log(exp(s phi) + N_i) - s phi = softplus(log N_i - s phi),    phi = phi(angle of i and its center)

Each rank has the local centers, which are the rows of S, and all embeddings, which are its columns. The sweep sums over
the negatives of each column. The rank that holds the center of an example's class computes their angle (`angles`). An
all-to-all sends the sum and the angle to the rank of the example, where the margin and a softplus give the loss. In the
backward pass autograd sends the derivatives by the sum and by the angle back,

    dL_i/dtheta_i = -s phi'(theta_i) N_i / (N_i + exp(s phi)),     dL_i/dc_ij = s exp(s c_ij) / (N_i + exp(s phi))

which contain no difference of a probability and 1.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .._base.normalize import UNIT
from ..comm import Communicator
from ..contract import KERNELS, Options, reduce_losses
from ..nodes import Bounds, Layout, Operands, Planned, RowStatistics, Towers, statistics_fields
from ..nodes.cross_entropy import one_positive
from ..partition import Partition
from ..sweep import NamedRows, Pairs, Selection
from ..sync import scale_gradient, shard_factor
from .agreement import IGNORED, Agreed, Batch, agree_on_classes
from .angles import nearest, target_angles
from .classes import check_complete, rows_of, rows_of_groups
from .logits import Logits, flat
from .margins.interface import (
    Margin,
    NegativeTransform,
    ObservesAngles,
    ObservesNorms,
    Regularizes,
    Targets,
    TransformsNegatives,
)
from .rows import KnownNorms, matrix, norms_of, take_rows
from .sample import Classes, sum_of


def negatives(
    agreed: Agreed,  # its lengths are those of all ranks' embeddings
    logits: Logits,
    x: Tensor,  # (B, d), all ranks' embeddings
    centers: Tensor,  # (K_r K, d), the sub-centers of a class in consecutive rows; or a matrix with these rows
    *,
    offsets: Tensor | None,  # (K_r,), added to the logits of these classes
    target_rows: Tensor,  # (B, k, K), the rows of an embedding's target classes
    transform: NegativeTransform | None,  # of the logits of negatives
) -> Planned:
    """Return the plan of each embedding's statistics over the local classes that are not its target classes.

    Collective at the first call of a form, where the ranks choose whether kernels compute them.
    """
    facts, s, best_of = agreed.facts, logits.margin.s, target_rows.shape[2]
    offsets = None if offsets is None else offsets.repeat_interleave(best_of)
    ceiling = None
    if logits.exclude_above is not None:
        ceiling = torch.full_like(agreed.norms[:, 0], s * logits.exclude_above)
        if offsets is not None:
            ceiling += offsets.detach()
    bound = UNIT**2 if transform is None else transform.bound(s * UNIT**2) / s
    if not logits.unit_embeddings:
        bound *= facts.norms["embeddings"]
    if not logits.unit_centers:
        bound *= agreed.longest
    stay_norms = agreed.norms if logits.unit_centers else None
    travel_norms = agreed.lengths if logits.unit_embeddings else None
    rows = Partition(tuple(best_of * count for count in agreed.partition.counts))
    return Planned(
        facts,
        (s, s),
        Operands(
            [centers, x],
            Towers((0,), (1,), stay_norms=stay_norms, travel_norms=travel_norms, stay_rows=agreed.index),
            Layout(rows, Partition((len(x),)), replicated=True),
        ),
        Selection(
            Pairs(excluded=NamedRows(target_rows.flatten(1))),
            ceiling=ceiling,
            transform=transform,
            offsets=offsets,
            best_of=best_of,
        ),
        Bounds(bound, offset=agreed.largest_offset),
        (),
        statistics_fields(target=False, mean_logit=logits.label_smoothing > 0),
    )


def combine_over_ranks(
    comm: Communicator,
    rows: Partition,  # the owners of the rows
    statistics: RowStatistics,  # of all rows over the local negatives
    target_parts: dict[str, Tensor],  # numbers of the target classes, each (B, k); 0 if the class is on another rank
) -> tuple[RowStatistics, dict[str, Tensor]]:
    """Return the statistics of the local rows over all classes, each (b_r, 1), and the target parts of these rows.

    Collective: 1 all-to-all of 2 B numbers, 4 B with label smoothing, and B more for each of `target_parts` after
    the first; the same in backward.
    """
    fields = (statistics.logsumexp, statistics.logits, statistics.count)
    columns = [x[:, None] for x in fields if x is not None]
    parts = columns + [x.to(columns[0]) for x in target_parts.values()]
    if comm.size == 1:
        logsumexp, *others = columns
        return RowStatistics(logsumexp, None, *others), dict(zip(target_parts, parts[len(columns) :], strict=True))
    num_local, widths = rows.counts[comm.rank], [x.shape[1] for x in parts]
    received = comm.all_to_all(
        torch.cat(parts, dim=1), send_counts=rows.counts, receive_counts=(num_local,) * comm.size, check=False
    )
    each = received.view(comm.size, num_local, sum(widths)).split(widths, dim=2)
    logsumexp, *others = each[: len(columns)]
    none = logsumexp.isneginf().all(0)  # without any negatives the gradient must be 0, not 0 / 0
    total = torch.where(none, float("-inf"), torch.where(none, 0.0, logsumexp).logsumexp(0))
    summed = {name: x.sum(0) for name, x in zip(target_parts, each[len(columns) :], strict=True)}
    return RowStatistics(total, None, *(x.sum(0) for x in others)), summed


def class_softmax(caller: str, batch: Batch, classes: Classes, logits: Logits, options: Options) -> Tensor:
    """Return the loss over the classes of a step."""
    agreed = agree_on_classes(caller, batch, classes, logits, options)
    with torch.set_grad_enabled(agreed.needs_grad):  # collectives without a handshake would join the graph in any case
        return _loss(caller, agreed, logits, options)


def _loss(caller: str, agreed: Agreed, logits: Logits, options: Options) -> Tensor:
    facts, sample = agreed.facts, agreed.sample
    is_labeled = agreed.labels != logits.ignore_index if any(facts.of_ranks(IGNORED)) else None
    alone = facts.comm.size == 1 and sample.ids is None and is_labeled is None
    local_classes = agreed.partition.rows(facts.rank)
    class_rows = agreed.labels if alone else rows_of(agreed.labels, local_classes, sample.ids)
    rows, comm = facts.rows["embeddings"], Communicator(facts.comm.transport, loss="sum")
    if sample.ids is not None and sample.rows is None:
        check_complete(comm, caller, class_rows, is_labeled)

    x = facts.inputs["embeddings"]
    if comm.size > 1:
        x = comm.all_gather(x, counts=rows.counts, check=False)
    factor = shard_factor(options.sync, comm.size, whole=options.reduction != "none")
    index, centers = agreed.index, scale_gradient(sample.centers, factor)
    best_of = 1 if centers.dim() == 2 else centers.shape[1]
    centers = flat(centers)[0] if index is None else matrix(centers)
    facts = facts.in_range(agreed.longest)
    # Embeddings and centers are used twice, and the two gradients are added. Embeddings are few: they are widened, so
    # that the sum is rounded once. Centers are many: only those in float16 are widened.
    dtype = facts.dtype if facts.features_dtype == torch.float16 else facts.features_dtype
    if index is not None and centers.dtype != dtype:  # of which autograd converts no sparse gradient
        centers, index = take_rows(centers, index), None
    x, centers = x.to(facts.dtype), centers.to(dtype)
    # The gradient of a bias is a sum over many rows, which half precision would not hold.
    bias = None if sample.bias is None else scale_gradient(sample.bias, factor).to(facts.dtype)
    offsets = sum_of(bias, sample.log_weights)
    places = rows_of_groups(class_rows, best_of)
    margin, in_kernels = logits.margin, bool(facts.plans.get(KERNELS))
    agreed = replace(agreed, facts=facts, index=index)
    if comm.size > 1 or agreed.lengths.dtype != x.dtype:
        agreed = replace(agreed, lengths=norms_of(x, in_kernels=in_kernels and logits.unit_embeddings))
    if facts.kernels and KERNELS not in facts.plans and not isinstance(margin, TransformsNegatives):
        # A first call chooses who computes before anything depends on it, so that it has the bits of later ones.
        negatives(agreed, logits, x, centers, offsets=offsets, target_rows=places, transform=None)
        in_kernels = bool(facts.plans.get(KERNELS))
        if in_kernels and logits.unit_centers:
            agreed = replace(agreed, norms=norms_of(centers, index, in_kernels=True))
        if in_kernels and logits.unit_embeddings:
            agreed = replace(agreed, lengths=norms_of(x, in_kernels=True))
    nearest_centers = nearest(x, centers, places, clamp=logits.clamp, index=index, in_kernels=in_kernels)
    angles, target_lengths, centers = target_angles(
        x, centers, nearest_centers, clamp=logits.clamp, index=index, in_kernels=in_kernels
    )
    all_norms = KnownNorms.apply(x, agreed.lengths)
    transform = _observe(margin, comm, angles.detach(), all_norms.detach()[:, 0], is_labeled)
    planned = negatives(agreed, logits, x, centers, offsets=offsets, target_rows=places, transform=transform)
    _, statistics = planned.statistics()
    assert statistics is not None

    target_parts = {"angles": angles}  # the numbers of a target class that the rank of the example needs
    if not logits.unit_centers:
        target_parts["lengths"] = target_lengths
    if bias is not None:
        target_parts["bias"] = torch.cat([bias, bias.new_zeros(1)])[class_rows]  # the last entry is read for NOT_HERE
    statistics, target_parts = combine_over_ranks(comm, rows, statistics, target_parts)
    local = rows.rows(facts.rank)
    targets = Targets(target_parts["angles"], all_norms[local])
    target_logits = logits.target_logits(targets, target_parts.get("lengths"), target_parts.get("bias"))
    losses = one_positive(statistics, target_logits, label_smoothing=logits.label_smoothing)
    if isinstance(margin, Regularizes):
        losses = losses + margin.regularizer(targets)
    if is_labeled is None:
        return reduce_losses(facts, losses.squeeze(1) if losses.shape[1] == 1 else losses.mean(1), rows.total)
    labeled = is_labeled[local]
    row_losses = torch.where(labeled, losses, 0.0).sum(1) / labeled.sum(1).clamp(min=1)
    return reduce_losses(facts, row_losses, is_labeled.any(1).sum(), labeled.any(1))


def _observe(
    margin: Margin,
    comm: Communicator,
    angles: Tensor,  # (B, k), 0 where the center is on another rank
    norms: Tensor,  # (B,), of all embeddings
    counts: Tensor | None,  # (B, k), whether each label counts; None: all do, and the host need not wait
) -> NegativeTransform | None:
    """Call the hooks of the margin that need all ranks' rows, and return its transform of negatives, if it has one.

    Collective: one all-reduce of the angles, if a hook needs them.
    """
    if isinstance(margin, ObservesNorms):
        margin.observe_norms(norms if counts is None else norms[counts.any(1)])
    if not isinstance(margin, ObservesAngles | TransformsNegatives):
        return None
    all_angles = comm.all_reduce(angles, check=False)
    if isinstance(margin, ObservesAngles):
        margin.observe_angles(all_angles.flatten() if counts is None else all_angles[counts])
    return margin.of_negatives(all_angles) if isinstance(margin, TransformsNegatives) else None
