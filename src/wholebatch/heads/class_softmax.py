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

import torch
from torch import Tensor

from .._normalize import row_norms
from ..comm import Communicator
from ..contract import Options, reduce_losses
from ..nodes.cross_entropy import one_positive
from ..sync import scale_gradient, shard_factor
from .angles import nearest, target_angles
from .classes import HeldClasses, rows_of_groups
from .entry import Batch, agree_on_classes
from .logits import Logits, flat
from .margins import AdaFace, CurricularFace, MagFace, Targets
from .negatives import Shard, negatives, of_local_rows
from .sample import Classes


def class_softmax(caller: str, batch: Batch, classes: Classes, logits: Logits, options: Options) -> Tensor:
    """Return the loss over the classes of a step."""
    agreed = agree_on_classes(caller, batch, classes, logits, options)
    facts, sample = agreed.facts, agreed.sample
    counts = agreed.labels != logits.ignore_index
    held = HeldClasses(agreed.partition, facts.rank, sample.ids)
    at = held.rows_of(agreed.labels)
    rows, comm = facts.rows["embeddings"], Communicator(facts.comm.transport, loss="sum")
    if not sample.complete:
        held.check_complete(comm, caller, at, counts)

    x = comm.all_gather(facts.inputs["embeddings"], counts=rows.counts, check=False)
    factor = shard_factor(options.sync, comm.size, whole=options.reduction != "none")
    centers, best_of = flat(scale_gradient(sample.centers, factor))
    facts = facts.in_range(agreed.longest)
    # Two gradients meet in each of them. Embeddings are few, and are widened; centers only where the range is small.
    narrow = facts.features_dtype == torch.float16
    x, centers = x.to(facts.dtype), centers.to(facts.dtype if narrow else facts.features_dtype)
    lengths = row_norms(x)
    # Of many rows one bias gets a gradient from each: half precision would not hold the sum.
    bias = None if sample.bias is None else scale_gradient(sample.bias, factor).to(facts.dtype)
    offsets = _sum(bias, sample.log_weights)
    places = rows_of_groups(at, best_of)
    nearest_centers = nearest(x, centers, places, clamp=logits.clamp)
    angles, target_lengths, centers = target_angles(x, centers, nearest_centers, clamp=logits.clamp)
    transform, margin = None, logits.margin
    if isinstance(margin, CurricularFace):
        all_angles = comm.all_reduce(angles.detach(), check=False)
        margin.observe(all_angles[counts])
        transform = margin.of_negatives(all_angles)
    shard = Shard(centers, agreed.norms, agreed.longest, agreed.partition, best_of, offsets, agreed.largest_offset)
    numbers = negatives(facts, logits, shard, (x, lengths), target_rows=places, transform=transform)

    of_targets = {"angles": angles}  # and what else the logit of a label's class is made of
    if not logits.of_unit_centers:
        of_targets["lengths"] = target_lengths
    if bias is not None:
        of_targets["bias"] = torch.cat([bias, bias.new_zeros(1)])[at]  # the last is for those that are NOT_HERE
    numbers, of_targets = of_local_rows(comm, rows, numbers, of_targets)
    local, wide = rows.rows(facts.rank), lengths.to(angles)[:, 0]
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
    return reduce_losses(facts, losses, counts.any(1).sum(), labeled.any(1))


def _sum(*parts: Tensor | None) -> Tensor | None:
    """Return the sum of the parts that there are, or None."""
    found = [x for x in parts if x is not None]
    return sum(found[1:], start=found[0]) if found else None
