"""PartialFC's loss as a function of the local embeddings, labels and centers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.checks import is_dense
from .._base.sharded import mark_sharded
from ..comm import Group
from ..contract import Checking, Options, Reduction, entry
from ..kernels import Kernel
from ..sweep import Memory, Precision
from ..sync import Sync
from .agreement import Batch
from .class_softmax import class_softmax
from .logits import Logits, Normalize
from .margins import ArcFace
from .margins.interface import Margin
from .sample import Classes, Sample


@entry
def partial_fc_loss(
    embeddings: Tensor,
    labels: Tensor,
    centers: Tensor,
    *,
    margin: Margin = ArcFace(),  # noqa: B008  # it is frozen
    margin_grad: str = "exact",
    normalize: Normalize = "both",
    bias: Tensor | None = None,
    class_ids: Tensor | None = None,
    log_weights: Tensor | None = None,
    exclude_above: float | None = None,
    num_classes: int | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    group: Group = None,
    sync: Sync = "mean",
    memory: Memory = "auto",
    kernel: Kernel = "auto",
    precision: Precision = "auto",
    checks: Checking = "entry",
) -> Tensor:
    r"""Return the cross-entropy over the classes of all ranks, with a margin for the target class, exact in gradient.

    L_i = log(exp(s phi(c_iy)) + sum_{j != y} exp(s c_ij)) - s phi(c_iy),    c = cosines of embeddings and centers

    Args:
        embeddings: (b_r, d), the local rows; normalized inside. b_r may differ between ranks and may be 0. float64,
            float32, bfloat16 or float16; cast to the dtype of the centers.
        labels: (b_r,) integers, the ids of their classes among all C; ignore_index: the row does not count. Or
            (b_r, k): a row has up to k classes, none of which is a negative of another, and L_i is the mean over them;
            a row with fewer has ignore_index in the other columns.
        centers: (C_r, d), the local classes; normalized inside. C_r may differ between ranks and may be 0. Or
            (C_r, K, d): K sub-centers of each class, of which the one nearest to an embedding counts (Deng et al.,
            2020, doi:10.1007/978-3-030-58621-8_43).
        margin: phi and s, such as :class:`wholebatch.ArcFace`, or your own :class:`wholebatch.heads.Margin`.
        margin_grad: "exact", or "straight_through": d phi / d c is replaced by 1, as in insightface's code.
        normalize: "both", or only "centers", "embeddings" or "none": a logit is s times the cosine, or the margin,
            times the norms of those that are not normalized. Rows of zeros have no angle, and always raise. Normalized
            rows are divided by max(norm, 1e-12), as by `torch.nn.functional.normalize`, and the angle of shorter rows
            is the arccosine of their product.
        bias: (C_r,), added to the logits of these classes; with label_smoothing up to 1e30 in absolute value, in
            float64 1e300.
        class_ids: (C_r,) ascending integers, the ids of the centers' classes, for a sample of them that includes every
            label of the batch. None: the ranks hold all classes, consecutive, rank 0's first.
        log_weights: (C_r,), added to the logits of these classes where they are negatives; limited like `bias`, and so
            is their sum with it. With minus the logarithms of the classes' sampling probabilities, the sum over
            negatives is on average that of all classes.
        exclude_above: a cosine; more similar negatives, possibly one class under two labels, are left out of the sum.
            insightface's interclass filtering sets their logits to 0 instead, and keeps exp(0) in the sum.
        num_classes: C, if known: labels must be smaller. None: C is the number of all centers.
        label_smoothing: weight of the mean over all classes of the step, in [0, 1].
        ignore_index: the label of rows that do not count.
        weights: (b_r,), >= 0; the mean is sum w_i L_i / sum w_i over the rows that count.
        reduction: "mean" over the rows that count, "sum", or "none": L_i of this rank's rows, (b_r,).
        group: ranks that share the batch and the classes, as in :func:`wholebatch.functional.clip_loss`.
        sync: the engine's reduction of the embeddings' gradients, as there. The gradients of the local centers and of
            `bias` are complete, whatever `sync` says, and no engine may reduce them. With reduction "none" each rank
            computes a scalar from its losses: L is their mean over ranks under "mean", because the engine averages the
            embeddings' gradients, and their sum under "sum" and None.
        memory: "flat", "auto" or bytes, as there, for the local classes times the batch.
        kernel: the implementation of a tile, as there; exclude_above, sub-centers and margins that transform negatives
            (:class:`wholebatch.CurricularFace`) run in plain PyTorch.
        precision: of products of embeddings with centers, as there. Cosines of target classes are always in float32.
        checks: "entry"; "deferred" is refused, because labels and norms of centers are read on the host.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.partial_fc_loss` on all embeddings and
        all centers. Its dtype is the centers', float32 for half precision.

    Work: 4 units of B C_r d multiply-adds per rank, 3 where exp(S) is kept. Memory beyond inputs and gradients: two
    tiles, a tile's centers, and on several ranks all embeddings, their gradient and a buffer of the reduce-scatter.

    Collectives (none on one process): forward 1 handshake, 1 all-gather of labels, 1 of embeddings, 1 all-to-all of
    2 B numbers (B more each for a bias, and for centers that are not normalized), 1 all-reduce of one number, with
    class_ids 1 of B; backward 1 handshake, the same all-to-all and 1 reduce-scatter of the embeddings' gradient. With a
    margin that observes angles or transforms negatives (CurricularFace): 1 all-reduce of B numbers more.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`; also
            labels that are not integers or not class ids, an embedding or a center of norm 0.
        RuntimeError: if the gradient is differentiated again.

    Source: An et al., 2020, arXiv:2010.05222; the margins' papers.

    >>> import torch, wholebatch as wb
    >>> x, centers = torch.eye(3, 4), torch.eye(3, 4, requires_grad=True)
    >>> round(wb.functional.partial_fc_loss(x, torch.arange(3), centers, margin=wb.CosFace(4.0, 0.5)).item(), 4)
    0.2395
    """

    def sample(_labels: Tensor | None) -> Sample:
        mark_sharded(centers, bias)
        return Sample(centers, class_ids, bias, log_weights)

    dtype = centers.dtype if is_dense(centers) and centers.is_floating_point() else torch.float32
    return class_softmax(
        "partial_fc_loss",
        Batch(embeddings, labels, weights),
        Classes(sample, dtype, num_classes, tensors=(centers, class_ids, bias, log_weights)),
        Logits(margin, margin_grad, normalize, exclude_above, label_smoothing, ignore_index),
        Options(group, sync, "gather", memory, reduction, kernel, precision, checks),
    )
