"""Batch-hard triplet loss: each row against its farthest positive and its nearest negative of the whole batch.

    p_i = the row of i's class that is farthest from i,    n_i = the row of another class that is nearest to i
    L_i = [ |z_i - p_i| - |z_i - n_i| + margin ]_+          or softplus instead of the hinge

One pass over S finds p_i and n_i, which are then fetched from their ranks. Everything else is O(b d).

Rows are compared by x . y - |y|^2 / 2, which orders y by its distance from x, with a rounding error of a few eps |x|^2.
The |y|^2 is needed for normalized rows as well: for a row of zeros, or one shorter than 1e-12, it is not 1. For the
cosine distance rows are compared by x . y. If a hardest row is too near for this precision, |x - y| << |x|, the search
is repeated in float64, and if float64 is too coarse as well, by differences of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.autograd import no_autocast
from .._base.checks import check_choice, check_flag, check_weight
from .._base.normalize import normalize_rows
from .._base.precision import wide_dtype
from ..contract import Checks, Options, Reduction, SweepOptions, entry
from ..exchange import ColumnData
from ..logsumexp import softplus
from ..nodes import Layout, choose_route
from ..nodes.fetch import fetch_rows
from ..partition import Tile
from ..sweep import Block, Driver, Factor, HardestSweep
from ._declaration import Declaration
from ._labeled import LISTED, Labeled, agree_labeled
from ._module import SweepLoss

DISTANCES = ("euclidean", "squared", "cosine")
_NEAR = {torch.float32: 1e-3, torch.float64: 1e-11}  # |x - y|^2 / |x|^2 with a rounding error of about a thousandth
_SHORT = 0.25  # |x|^2 of a normalized row that was shorter than 1e-12


@entry
def triplet_loss(
    features: Tensor,
    labels: Tensor,
    *,
    margin: float = 0.2,
    smooth: bool = False,
    distance: str = "euclidean",
    normalize: bool = True,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[SweepOptions],
) -> Tensor:
    r"""Return a hinge on the distances to each row's farthest positive and nearest negative among all ranks' rows.

    L_i = max(0, D(z_i, p_i) - D(z_i, n_i) + margin),
    p_i = argmax_{j in P(i)} D(z_i, z_j),    n_i = argmin_{j in N(i)} D(z_i, z_j).

    L is the mean over the rows that have both a positive and a negative, and 0 if there is no such row. The choice of
    the hardest rows carries no gradient; between equally hard ones it is arbitrary.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers >= 0, the class of each example.
        ignore_index: a label whose rows are left out, as in :func:`wholebatch.functional.sup_con_loss`.
        margin: of the hinge, >= 0.
        smooth: log(1 + exp(x)) instead of the hinge max(0, x); with `margin=0` this is the paper's soft margin.
        distance: D: "euclidean", "squared" (Euclidean), or "cosine", 1 - cos.
        normalize: divide the rows by their norms first; "cosine" does so anyway.
        weights: (b_r,), one for each example, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": L_i of this rank's rows, (b_r,) or (b_r, v), 0 without a positive or
            without a negative; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.SweepOptions`. Nothing is kept.

    Returns:
        L, the same on every rank: `wholebatch.reference.triplet_loss` of the whole batch, at least in float32.

    Collectives: forward 1 handshake, all-gathers of labels and of W numbers, those of the exchange for Z, 2
    all-to-alls, 2 all-reduces of a number; backward 1 handshake and 1 all-to-all. Work: 1 unit of b_r B d
    multiply-adds per rank; another in float64 if features of lower precision have a hardest row within 3% of their
    norm (of their distance from the mean, if they are not normalized), or if a row has a norm below 1e-12 and is not
    zero; and one of differences if a hardest row is within 3e-6 of their norm. Memory beyond inputs and gradients: two
    tiles, O(b_r d), and on several ranks the exchange's memory for Z.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.sup_con_loss`.
        RuntimeError: if the gradient is differentiated again.

    Source: Hermans et al., 2017, arXiv:1703.07737, equation 5.

    >>> import torch, wholebatch as wb
    >>> wb.functional.triplet_loss(torch.eye(3), torch.tensor([0, 0, 1]))
    tensor(0.2000)
    """
    data = agree_labeled(
        "triplet_loss",
        Options(reduction=reduction, **options),
        (features, labels, weights, ignore_index),
        Checks.of(_check, reads=LISTED, margin=margin, smooth=smooth, distance=distance, normalize=normalize),
    )
    facts = data.facts
    normalized = normalize or distance == "cosine"
    features = facts.inputs["features"].to(facts.dtype)
    z = normalize_rows(features) if normalized else features
    positives, negatives = _hardest(data, features.detach(), z.detach(), normalized, by_cosine=distance == "cosine")
    complete = (positives >= 0) & (negatives >= 0)
    anchors = z[complete]
    rows = fetch_rows(facts.comm, z, data.rows, torch.cat([positives[complete], negatives[complete]]))
    far, near = (_distance(anchors, other, distance) for other in rows.tensor_split(2))
    violated = far - near + margin
    violated = softplus(violated) if smooth else torch.relu(violated)
    losses = z.new_zeros(len(z)).masked_scatter(complete, violated)
    return data.reduce(losses.to(wide_dtype(facts.device)), data.anchors_with_negatives, complete)


@torch.no_grad()
@no_autocast
def _hardest(
    data: Labeled, features: Tensor, z: Tensor, normalized: bool, *, by_cosine: bool, by_differences: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the global indices of each row's farthest positive and nearest negative, -1 without one.

    Args:
        data: the labels.
        features: this rank's rows, (b, d), as they are.
        z: these, or normalized.
        normalized: compare normalized rows. From other rows the mean is subtracted first: this changes no distance, and
            a large mean would hide the differences.
        by_cosine: compare rows by x . y instead of by distance.
        by_differences: compute distances from differences of rows, which is slow and exact however near they are.
    """
    if not normalized and not by_differences:
        z = features - data.facts.comm.all_reduce(features.sum(0), check=False) / data.rows.total
    x = y = z
    if not by_cosine and not by_differences:
        x = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)
        y = torch.cat([z, z.square().sum(1, keepdim=True) / -2], dim=1)
    route = choose_route(data.facts, Layout(data.rows, data.rows), keep=False, dtype=z.dtype)
    exchange, side = route.exchange, route.budget.side
    driver = (_Differences if by_differences else Driver)(x, 1.0, side=side, largest=exchange.largest_block)
    sweep = HardestSweep(driver, data.pairs)

    def visit(block: Block, _columns: ColumnData) -> None:
        sweep.block(block)

    exchange.accumulate(exchange.fetch(y), visit)
    if not by_differences and not (by_cosine and z.dtype == torch.float64):
        norms, near = z.square().sum(1), _NEAR[z.dtype]
        unclear = torch.zeros_like(norms)
        for index, key in ((sweep.positives, sweep.smallest), (sweep.negatives, sweep.largest)):
            away = 2 - 2 * key if by_cosine else norms - 2 * key
            unclear += (index >= 0) & (away < near * norms)
            # A row that is much shorter than the others has almost the same distance from all of them.
            if normalized and z.dtype != torch.float64:
                unclear += (index >= 0) & (norms > 0) & (norms < _SHORT)
        if data.facts.comm.all_reduce(unclear.sum(), check=False).item():
            exact = z.dtype == torch.float64
            wide = features.double()
            z = normalize_rows(wide) if normalized else wide
            return _hardest(data, wide, z, normalized, by_cosine=by_cosine, by_differences=exact)
    return sweep.positives, sweep.negatives


class _Differences(Driver):
    """A driver with S_ij = -|x_i - y_j|."""

    def logits(self, tile: Tile, x: Factor, y: Factor) -> Tensor:
        away = torch.cdist(x[0], y[0], compute_mode="donot_use_mm_for_euclid_dist")
        return torch.neg(away, out=self.buffer(tile))


def _distance(x: Tensor, y: Tensor, distance: str) -> Tensor:
    """Return the distances of paired rows, (k,)."""
    if distance == "cosine":
        return 1 - (x * y).sum(1)
    return (x - y).square().sum(1) if distance == "squared" else torch.linalg.vector_norm(x - y, dim=1)


def _check(margin: float, smooth: bool, distance: str, normalize: bool) -> None:
    check_choice("distance", distance, DISTANCES)
    check_weight("margin", margin, "negatives should be farther than positives by this distance")
    check_flag("smooth", smooth)
    check_flag("normalize", normalize)


class TripletLoss(SweepLoss, check=_check):
    """Batch-hard triplet loss over the global batch: the settings of :func:`wholebatch.functional.triplet_loss`."""

    margin: float = 0.2
    smooth: bool = False
    distance: str = "euclidean"
    normalize: bool = True
    ignore_index: int | None = None

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.triplet_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return triplet_loss(features, labels, weights=weights, **self.settings)


DECLARATION = Declaration(triplet_loss, TripletLoss)
