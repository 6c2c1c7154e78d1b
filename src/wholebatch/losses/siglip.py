"""SigLIP: one binary classification for every pair of the global batch.

    S_ij = scale x_i . y_j + bias          i, j = 1 ... B: the rows of all ranks, rank 0 first
    L    = 1/B sum_ij -log sigmoid(z_ij S_ij),          z_ij = 1 if i = j, else -1

The entries are independent of each other, so the forward pass computes the gradient as well, and S only once. A tile is
computed in `sweep.sigmoid` or in `kernels.tiles.sigmoid`; the dense formula is in `reference.two_towers`.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_choice
from ..contract import (
    Checks,
    Inputs,
    KernelOptions,
    Options,
    Reduction,
    agree,
    entry,
    reduce_losses,
    reduce_total,
)
from ..nodes import Layout, choose_route
from ..nodes.sigmoid import SigmoidPlan
from ..nodes.sigmoid_in_kernels import sigmoid_losses
from ..sweep import Pairs
from ._declaration import Declaration, Sweep
from ._logit_scale import TakesLogitBias
from ._module import KernelLoss
from ._pairs import EQUAL_IDS, EqualIdsAre, pairs_of_rows


@entry
def siglip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    logit_bias: Tensor | float,
    *,
    ids: Tensor | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the binary cross-entropy of all pairs of images and texts of all ranks, with its exact gradient.

    S = logit_scale * X Y^T + logit_bias,    L = sum_ij softplus(-z_ij S_ij) / B,    X, Y: all ranks' rows.

    The sum over all B^2 pairs is divided by B, the number of images of all ranks.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a number or a tensor of
            shape () or [1], the same on all ranks.
        logit_bias: added to all logits, about -log B at the start of training; a scalar like logit_scale.
        ids: (b_r,) integers; pairs with equal ids belong together.
        equal_ids: "positive": z_ij = 1 for them. "excluded": they are left out of the sum.
        weights: (b_r,), one for each image, >= 0: the weight of all its pairs; L is divided by the sum of weights.
        reduction: "mean" over images, "sum", or "none": L_i of this rank's images, (b_r,), for which the backward
            pass sweeps again; see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`. Nothing is kept.

    Returns:
        L, the same on every rank: `wholebatch.reference.siglip_loss` of the whole batch, at least in float32.

    The backward pass only multiplies. A second one through the same graph (`retain_graph=True`) sweeps again.

    Collectives: forward 1 handshake, those of the exchange for Y and for dY, and 1 all-reduce of the loss; backward 1
    handshake, and 1 all-reduce of the scalars' gradients under "mean". Work: 3 units of b B d multiply-adds per rank,
    all in the forward pass; 1 if no gradient is needed. Memory beyond inputs and gradients: two tiles, and on several
    ranks the exchange's memory.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`.
        RuntimeError: if the gradient is differentiated again.

    Source: Zhai et al., 2023, arXiv:2303.15343, equation 1 and algorithm 1.

    >>> import torch, wholebatch as wb
    >>> x = torch.eye(3)
    >>> wb.functional.siglip_loss(x, x, 10.0, -5.0)
    tensor(0.0201)
    """
    facts = agree(
        "siglip_loss",
        Options(reduction=reduction, **options),
        Inputs(
            features={"image_features": image_features, "text_features": text_features},
            scalars={"logit_scale": logit_scale, "logit_bias": logit_bias},
            ids={"ids": (ids, "image_features")},
            weights=(weights, "image_features"),
            paired=("image_features", "text_features"),
            any_scale=True,
        ),
        Checks(check=lambda: _check(equal_ids), must_match=("equal_ids",), settings=(equal_ids,)),
    )
    facts = facts.in_units()
    rows, inputs, per_row = facts.rows["image_features"], facts.inputs, reduction == "none"
    layout = facts.once("layout", lambda: Layout(rows, rows))

    def pairs() -> Pairs:
        return pairs_of_rows(rows.rows(facts.rank), None if ids is None else facts.all_ids("ids"), equal_ids)

    plan = SigmoidPlan(
        choose_route(facts, layout, keep=False),
        facts.once("pairs", pairs) if ids is None else pairs(),
        facts.factor_of("logit_scale"),
        facts.factor_of("logit_bias"),
        facts.differentiable,
        per_row,
        facts.kernels,
    )
    loss = sigmoid_losses(facts, plan, layout, inputs["image_features"], inputs["text_features"])
    return (reduce_losses if per_row else reduce_total)(facts, loss, rows.total)


def _check(equal_ids: str) -> dict[str, str]:
    return {"equal_ids": check_choice("equal_ids", equal_ids, EQUAL_IDS)}


class SigLIPLoss(TakesLogitBias, KernelLoss, check=_check):
    """SigLIP over the global batch: the settings of :func:`wholebatch.functional.siglip_loss`.

    `logit_scale` and `logit_bias` may enter `forward`, so that they can stay inside the model that the engine wraps, or
    be defaults of this module.

    Args:
        logit_scale, logit_bias: defaults for calls that leave them out, as in :class:`wholebatch.CLIPLoss`; each call
            needs both, from here or from its arguments. A bias is usually negative; a Scale is positive.
    """

    equal_ids: EqualIdsAre = "positive"

    @entry
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        logit_bias: Tensor | float | None = None,
        *,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.siglip_loss`: (b_r, d), (b_r, d), two scalars -> L, the same everywhere."""
        return siglip_loss(
            image_features,
            text_features,
            ids=ids,
            weights=weights,
            **self._settings_of_call(logit_scale=logit_scale, logit_bias=logit_bias),
        )


DECLARATION = Declaration(siglip_loss, SigLIPLoss, Sweep(one_pass=True))
