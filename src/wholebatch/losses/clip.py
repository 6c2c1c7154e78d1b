"""CLIP: symmetric softmax cross-entropy over the global batch, exact on any number of ranks, flat in memory.

    S_ij = scale x_i . y_j + bias          i, j = 1 ... B: the rows of all ranks, rank 0 first
    L    = 1/(2B) [ sum_i (logsumexp_j S_ij - t_i) + sum_j (logsumexp_i S_ij - t'_j) ]

where t_i is the target's mean logit, (1 - e) S_ii + (e/B) sum_j S_ij with label smoothing e, and t'_j likewise over
the column. With label smoothing, the sweep sums the logits as well, and exp(S) is not kept for the backward pass.

A bias shifts all logits equally. So it leaves L unchanged, and its gradient is exactly 0.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_choice, check_label_smoothing
from ..contract import Checks, Facts, Inputs, KernelOptions, Options, Reduction, agree, entry, reduce_losses
from ..nodes import Bounds, Layout, Operands, Towers, pair_losses, row_statistics, statistics_fields
from ..nodes.cross_entropy import how_many_equal, many_positives, one_positive
from ..sweep import Selection
from ._declaration import Declaration, Sweep
from ._logit_scale import TakesLogitBias
from ._module import KernelLoss
from ._pairs import EQUAL_IDS, EqualIdsAre, pairs_of_rows
from .statistics import report_statistics

_TOWERS = Towers(stays=(0,), travels=(1,))


@entry
def clip_loss(
    image_features: Tensor,
    text_features: Tensor,
    logit_scale: Tensor | float,
    *,
    logit_bias: Tensor | float | None = None,
    ids: Tensor | None = None,
    equal_ids: EqualIdsAre = "positive",
    weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the symmetric cross-entropy between the images and texts of all ranks, with its exact gradient.

    S = logit_scale * X Y^T + logit_bias,    L = (CE(S, diagonal) + CE(S^T, diagonal)) / 2,    X, Y: all ranks' rows.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        logit_scale: multiplies the similarities (1 / temperature, already exponentiated); a number or a tensor of
            shape () or [1], the same on all ranks.
        logit_bias: added to all logits; a number or a tensor of shape () or [1]. It does not change the softmax. Its
            gradient is exactly 0, not None, so that engines which look for unused parameters find it used.
        ids: (b_r,) integers; pairs with equal ids (the same caption, the same product) belong together.
        equal_ids: "positive": all pairs with equal ids are positives, and L is the mean over those of each row and of
            each column (UniCL). "excluded": only row i is row i's positive; the others are left out of its sum.
        weights: (b_r,), one for each pair, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        label_smoothing: weight e of the uniform distribution in both targets, 0 <= e <= 1.
        reduction: "mean", "sum" over all pairs of all ranks, or "none": L_i of this rank's pairs, (b_r,), times
            their weights if given. Each rank then makes a scalar of them. The gradient is that of the sum of these
            scalars over the ranks, or after the engine's averaging that of their mean. `sync` does not matter then,
            because every parameter here is replicated; for sharded ones see
            :func:`wholebatch.functional.partial_fc_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.clip_loss` of the whole batch, at least in float32.

    Collectives, none on one process (b, W: rows of this rank, number of ranks):

        pass      with exchange "gather"                        with exchange "ring"
        --------  --------------------------------------------  ----------------------------------------------------
        forward   1 handshake of 512 bytes                      1 handshake of 512 bytes
                  1 all-gather of Y                             W - 1 messages of a block of Y
                  1 all-reduce of B numbers                     W messages of a block's b numbers
                  1 all-reduce of the loss                      1 all-reduce of the loss
        backward  1 handshake                                   1 handshake
                  1 all-gather of B numbers                     the same messages as forward
                  1 reduce-scatter of dY, or W reductions       as many messages of gradients

    Forward adds 1 all-gather of ids if given, and 1 all-reduce of a number where logits may exceed 70 and pairs are
    nearly opposite. Where one shift underflows (see `wholebatch.logsumexp`), it passes over S three times, for the sums
    that underflow, for maxima and for sums relative to these; each time with the messages of the ring or with the
    all-reduce of "gather". Backward adds 1 all-reduce of the learnable scalars under "mean", and 1 of a number where
    products are in half precision. On GPUs its handshake is 1 all-gather of two numbers, for which the host does not
    wait.

    Work: 4 units of b B d multiply-adds per rank, 1 forward and 3 backward; 3 for the part of exp(S) that is kept.
    Memory beyond inputs and gradients: two tiles and O(B), and on several ranks Y, its gradient, and a buffer of the
    reduce-scatter ("gather", 3 B d), or five blocks of Y ("ring", 5 b d).

    Raises:
        ValueError: on every rank, whichever rank made the mistake: for shapes, dtypes, devices or embedding sizes that
            differ, a scale that is no scalar or differs between ranks, NaN or infinite features, an empty global
            batch, an option that does not exist, a `memory` that is too small for any tile. Only on the rank that
            made the mistake, which cannot tell the others: for a `group` that is no group, or without this rank.
        RuntimeError: if the gradient is differentiated again.

    Source: Radford et al., 2021, arXiv:2103.00020, figure 3.

    >>> import torch, wholebatch as wb
    >>> x, y = torch.eye(3, dtype=torch.float64, requires_grad=True), torch.eye(3, dtype=torch.float64)
    >>> wb.functional.clip_loss(x, y, logit_scale=10.0)
    tensor(9.0796e-05, dtype=torch.float64, grad_fn=<DivBackward0>)
    """
    facts = agree(
        "clip_loss",
        Options(reduction=reduction, **options),
        Inputs(
            features={"image_features": image_features, "text_features": text_features},
            scalars={"logit_scale": logit_scale, "logit_bias": logit_bias},
            ids={"ids": (ids, "image_features")},
            weights=(weights, "image_features"),
            optional=("logit_bias",),
            paired=("image_features", "text_features"),
            matching=("image_features", "text_features"),
            any_scale=True,
        ),
        Checks(
            check=lambda: _check(label_smoothing, equal_ids),
            must_match=("label_smoothing", "equal_ids"),
            settings=(label_smoothing, equal_ids),
        ),
    )
    rows = facts.rows["image_features"]
    local = facts.once("local rows", lambda: rows.rows(facts.rank))
    all_ids = None if ids is None else facts.all_ids("ids")
    several = all_ids is not None and equal_ids == "positive"
    fields = facts.once(
        "fields", lambda: statistics_fields(mean_logit=label_smoothing > 0, statistics=facts.statistics)
    )

    def select() -> Selection:
        return Selection(pairs_of_rows(local, all_ids, equal_ids), over="all" if several else "negatives")

    call = (
        facts,
        (facts.scalars["logit_scale"], facts.inputs["logit_scale"]),
        Operands(
            [facts.inputs["image_features"], facts.inputs["text_features"]],
            _TOWERS,
            facts.once("layout", lambda: Layout(rows, rows)),
        ),
        facts.once("selection", select) if all_ids is None else select(),
        Bounds(
            facts.norms["image_features"] * facts.norms["text_features"],
            min_pair_product=facts.min_pair_product,
            add_positive=0.0 if several else 1.0,
        ),
    )
    if fields == ("sum", "target") and not several:
        return _attach_bias(reduce_losses(facts, pair_losses(*call, both=True), rows.total), facts)
    image_side, text_side = row_statistics(
        *call, rows=fields, cols=fields if several else tuple(name for name in fields if name != "target")
    )
    assert image_side is not None
    assert text_side is not None
    assert image_side.target is not None
    if several:
        assert all_ids is not None
        assert text_side.target is not None
        positives = how_many_equal(all_ids[local], all_ids)
        losses = [many_positives(side, positives, label_smoothing=label_smoothing) for side in (image_side, text_side)]
        targets = [image_side.target / positives, text_side.target / positives]
    else:
        target = image_side.target  # the pair's logit, of its row and of its column
        losses = [one_positive(side, target, label_smoothing=label_smoothing) for side in (image_side, text_side)]
        targets = [target, target]
    loss = reduce_losses(facts, (losses[0] + losses[1]) / 2, rows.total)
    if facts.statistics:
        sides = zip((image_side, text_side), targets, strict=True)
        report_statistics(facts.comm, facts.factor_of("logit_scale"), list(sides))
    return _attach_bias(loss, facts)


def _attach_bias(loss: Tensor, facts: Facts) -> Tensor:
    """Return the loss, which depends on the bias with a gradient of 0."""
    bias = facts.inputs["logit_bias"]
    return loss + 0 * bias.to(loss).view(()) if isinstance(bias, Tensor) else loss


def _check(label_smoothing: float, equal_ids: EqualIdsAre) -> dict[str, Any]:
    check_label_smoothing(label_smoothing)
    check_choice("equal_ids", equal_ids, EQUAL_IDS)
    return {"label_smoothing": float(label_smoothing), "equal_ids": equal_ids}


class CLIPLoss(TakesLogitBias, KernelLoss, check=_check):
    """Symmetric cross-entropy over the global batch: the settings of :func:`wholebatch.functional.clip_loss`.

    `logit_scale` may enter `forward`, so that it can stay inside the model that the engine wraps, or be a default of
    this module. A learned default is a parameter of the module: wrap it like the model, or keep it inside.

    Args:
        logit_scale, logit_bias: defaults for calls that leave them out; a number, a tensor, an `nn.Parameter`, or a
            :class:`wholebatch.Scale`, which is called once in each forward and stays positive. Each call needs a
            scale, from here or from its arguments.
    """

    label_smoothing: float = 0.0
    equal_ids: EqualIdsAre = "positive"

    @entry
    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor | float | None = None,
        *,
        logit_bias: Tensor | float | None = None,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """See :func:`wholebatch.functional.clip_loss`: (b_r, d), (b_r, d), a scalar -> L, the same on all ranks."""
        return clip_loss(
            image_features,
            text_features,
            ids=ids,
            weights=weights,
            **self._settings_of_call(logit_scale=logit_scale, logit_bias=logit_bias, optional=("logit_bias",)),
        )


DECLARATION = Declaration(clip_loss, CLIPLoss, Sweep())
