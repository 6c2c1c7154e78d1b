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

import torch
from torch import Tensor

from .._base.normalize import row_norms
from ..comm import Communicator
from ..contract import Options, reduce_losses
from ..nodes.cross_entropy import one_positive
from ..sync import scale_gradient, shard_factor
from .agreement import IGNORED, Agreed, Batch, agree_on_classes
from .angles import nearest, target_angles
from .classes import LocalClasses, rows_of_groups
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
from .negatives import Shard, combine_over_ranks, negatives
from .rows import matrix, take_rows
from .sample import Classes, sum_of


def class_softmax(caller: str, batch: Batch, classes: Classes, logits: Logits, options: Options) -> Tensor:
    """Return the loss over the classes of a step."""
    agreed = agree_on_classes(caller, batch, classes, logits, options)
    with torch.set_grad_enabled(agreed.needs_grad):  # collectives without a handshake would join the graph in any case
        return _loss(caller, agreed, logits, options)


def _loss(caller: str, agreed: Agreed, logits: Logits, options: Options) -> Tensor:
    facts, sample = agreed.facts, agreed.sample
    counts = agreed.labels != logits.ignore_index
    local_classes = LocalClasses(agreed.partition, facts.rank, sample.ids)
    class_rows = local_classes.rows_of(agreed.labels)
    rows, comm = facts.rows["embeddings"], Communicator(facts.comm.transport, loss="sum")
    if not sample.complete:
        local_classes.check_complete(comm, caller, class_rows, counts)

    x = comm.all_gather(facts.inputs["embeddings"], counts=rows.counts, check=False)
    factor = shard_factor(options.sync, comm.size, whole=options.reduction != "none")
    index, centers = agreed.index, scale_gradient(sample.centers, factor)
    best_of = 1 if centers.dim() == 2 else centers.shape[1]
    centers = flat(centers)[0] if index is None else matrix(centers)
    facts = facts.in_range(agreed.longest)
    # Embeddings and centers are used twice, and the two gradients are added. Embeddings are few: they are widened, so
    # that the sum is rounded once. Centers are many: only those in float16 are widened.
    narrow = facts.features_dtype == torch.float16
    if index is not None and narrow:
        centers, index = take_rows(centers, index), None
    x, centers = x.to(facts.dtype), centers.to(facts.dtype if narrow else facts.features_dtype)
    lengths = row_norms(x)
    # The gradient of a bias is a sum over many rows, which half precision would not hold.
    bias = None if sample.bias is None else scale_gradient(sample.bias, factor).to(facts.dtype)
    offsets = sum_of(bias, sample.log_weights)
    places = rows_of_groups(class_rows, best_of)
    nearest_centers = nearest(x, centers, places, clamp=logits.clamp, index=index)
    angles, target_lengths, centers = target_angles(x, centers, nearest_centers, clamp=logits.clamp, index=index)
    margin, all_norms = logits.margin, lengths.to(angles)[:, 0]
    is_labeled = counts if any(facts.of_ranks(IGNORED)) else None
    transform = _observe(margin, comm, angles.detach(), all_norms.detach(), is_labeled)
    shard = Shard(
        centers, index, agreed.norms, agreed.longest, agreed.partition, best_of, offsets, agreed.largest_offset
    )
    statistics = negatives(facts, logits, shard, (x, lengths), target_rows=places, transform=transform)

    target_parts = {"angles": angles}  # the numbers of a target class that the rank of the example needs
    if not logits.unit_centers:
        target_parts["lengths"] = target_lengths
    if bias is not None:
        target_parts["bias"] = torch.cat([bias, bias.new_zeros(1)])[class_rows]  # the last entry is read for NOT_HERE
    statistics, target_parts = combine_over_ranks(comm, rows, statistics, target_parts)
    local = rows.rows(facts.rank)
    targets = Targets(target_parts["angles"], all_norms[local, None])
    target_logits = logits.target_logits(targets, target_parts.get("lengths"), target_parts.get("bias"))
    smoothing = logits.label_smoothing
    losses = torch.stack([one_positive(statistics, z, label_smoothing=smoothing) for z in target_logits.unbind(1)], 1)
    if isinstance(margin, Regularizes):
        losses = losses + margin.regularizer(targets)
    labeled = counts[local]
    losses = torch.where(labeled, losses, 0.0).sum(1) / labeled.sum(1).clamp(min=1)
    return reduce_losses(facts, losses, counts.any(1).sum(), labeled.any(1))


def _observe(
    margin: Margin, comm: Communicator, angles: Tensor, norms: Tensor, counts: Tensor | None
) -> NegativeTransform | None:
    """Call the hooks of the margin that need all ranks' rows, and return its transform of negatives, if it has one.

    Collective: one all-reduce of the angles, if a hook needs them.

    Args:
        margin: the margin.
        comm: the ranks.
        angles: (B, k), 0 where the center is on another rank.
        norms: (B,), of all embeddings.
        counts: (B, k), whether each label counts; None: all do, and the host need not wait for their number.
    """
    if isinstance(margin, ObservesNorms):
        margin.observe_norms(norms if counts is None else norms[counts.any(1)])
    if not isinstance(margin, ObservesAngles | TransformsNegatives):
        return None
    all_angles = comm.all_reduce(angles, check=False)
    if isinstance(margin, ObservesAngles):
        margin.observe_angles(all_angles.flatten() if counts is None else all_angles[counts])
    return margin.of_negatives(all_angles) if isinstance(margin, TransformsNegatives) else None
