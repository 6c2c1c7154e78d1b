"""Smooth-AP: a differentiable average precision of each row's positives among all other rows.

    AP_i = 1/|P(i)| sum_{p in P(i)} (1 + positive_ip) / (1 + all_ip)
    L    = mean_i (1 - AP_i)

where all_ip is the smoothed number of candidates that are more similar to i than p is, and positive_ip that of
positives (see `sweep.ranking`). For rows with at most P positives memory is O(b P), and time grows with P.
"""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number, check_temperature
from .._base.normalize import normalize_rows
from ..contract import Checks, Options, ProductOptions, Reduction, entry
from ..nodes import Layout, choose_route
from ..nodes.matrix import fits, matrix_of
from ..nodes.ranks import PositiveRanks, RankingPlan
from ._declaration import Declaration
from ._labeled import LISTED, agree_labeled
from ._module import ProductLoss


@entry
def smooth_ap_loss(
    features: Tensor,
    labels: Tensor,
    *,
    temperature: float = 0.01,
    ignore_index: int | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[ProductOptions],
) -> Tensor:
    r"""Return 1 - the average precision of each row's positives among the rows of all ranks, smoothed by sigmoids.

    L_i = 1 - mean_{p in P(i)} (1 + sum_{q in P(i), q != p} s(c_iq - c_ip)) / (1 + sum_{j != i, p} s(c_ij - c_ip)),
    s(x) = sigmoid(x / temperature), with the cosines c of all ranks' rows; P(i): the others with i's label.

    L is the mean over the rows that have a positive, and 0 if there is no such row.

    Args:
        features: Z_r, (b_r, d), this rank's rows, or (b_r, v, d) for v views of each example; they are normalized
            inside. b_r may differ between ranks and may be 0. float64, float32, bfloat16 or float16.
        labels: (b_r,) integers >= 0, the class of each example; classes need not be equally frequent.
        ignore_index: a label whose rows are left out, as in :func:`wholebatch.functional.sup_con_loss`.
        temperature: of the sigmoids; a positive number. With a small one the gradient comes from few pairs.
        weights: (b_r,), one for each example, or (b_r, v), >= 0; the mean is sum w_i L_i / sum w_i.
        reduction: "mean", "sum", or "none": L_i of this rank's rows, (b_r,) or (b_r, v), 0 without a positive; see
            :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.ProductOptions`. Nothing is kept.

    Returns:
        L, the same on every rank: `wholebatch.reference.smooth_ap_loss` of the whole batch, at least in float32.

    Collectives: forward 1 handshake, 1 all-gather of labels, those of the exchange for Z, 1 all-reduce of a number;
    backward 1 handshake, and those of the exchange for dZ. Work: for rows with at most P positives, 5 units of b_r B d
    multiply-adds per rank and 2 P sigmoids for each entry of S. Memory beyond inputs and gradients: four tiles,
    O(b_r P), and on several ranks the exchange's memory for Z.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.sup_con_loss`.
        RuntimeError: if the gradient is differentiated again.

    Source: Brown et al., 2020, arXiv:2007.12163, equations 5 and 6.

    >>> import torch, wholebatch as wb
    >>> z = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8]])
    >>> wb.functional.smooth_ap_loss(z, torch.tensor([0, 1, 0]), temperature=0.1)
    tensor(0.4808)
    """
    data = agree_labeled(
        "smooth_ap_loss",
        Options(reduction=reduction, **options),
        (features, labels, weights, ignore_index),
        Checks(lambda: _check(temperature), must_match=("temperature",), settings=(temperature,), reads=LISTED),
    )
    facts = data.facts
    layout, z, count = Layout(data.rows, data.rows), normalize_rows(facts.inputs["features"]), data.positives
    largest = int(count.max()) if len(count) else 0
    s = matrix_of(facts, layout, z, z) if fits(facts.device, len(z) * largest, len(z)) else None
    if s is not None:
        precisions = _precisions(s, data.local_labels, float(temperature))
    else:
        plan = RankingPlan(choose_route(facts, layout, keep=False), data.pairs, largest, float(temperature))
        rank_in_all, rank_in_positives = PositiveRanks.apply(plan, z, z)
        exists = torch.arange(largest, device=z.device) < count[:, None]
        precisions = torch.where(exists, (1 + rank_in_positives) / (1 + rank_in_all), 0.0).sum(1)
    losses = torch.where(count > 0, 1 - precisions / count.clamp(min=1), 0.0)
    return data.reduce(losses, data.anchors, count > 0)


def _precisions(s: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the sum of the precisions at each row's positives, (b,), from all of S."""
    index = torch.arange(len(s), device=s.device)
    same = labels[:, None] == labels
    rows, positives = same.fill_diagonal_(False).nonzero(as_tuple=True)
    counts = (index != rows[:, None]) & (index != positives[:, None])
    larger = (s[rows] - s[rows, positives, None]).div(temperature).sigmoid() * counts
    precision = (1 + (larger * same[rows]).sum(1)) / (1 + larger.sum(1))
    return torch.zeros_like(s[:, 0]).index_add(0, rows, precision)


def _check(temperature: float) -> dict[str, object]:
    return {"temperature": check_temperature("temperature", check_number("temperature", temperature))}


class SmoothAPLoss(ProductLoss, check=_check):
    """Smooth-AP over the global batch: the settings of :func:`wholebatch.functional.smooth_ap_loss`."""

    temperature: float = 0.01
    ignore_index: int | None = None

    @entry
    def forward(self, features: Tensor, labels: Tensor, *, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.smooth_ap_loss`: (b_r, d), (b_r,) -> L, the same on all ranks."""
        return smooth_ap_loss(features, labels, weights=weights, **self.settings)


DECLARATION = Declaration(smooth_ap_loss, SmoothAPLoss, scale="none")  # its temperature is that of ranks' sigmoids
