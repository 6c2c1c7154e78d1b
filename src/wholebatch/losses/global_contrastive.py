"""Global contrastive loss (SogCLR): a moving average across batches of each row's sum over negatives.

    g_i  = 1/(B - 1) sum_{j != i} exp((c_ij - c_ii) / t)          of image i; likewise h_i of text i, over images
    u_i <- (1 - gamma) u_i + gamma g_i                            kept for every example of the data set, v_i for texts
    L    = t/2 1/B sum_i [ log(e + u_i) + log(e + v_i) ]
    dL   = t/2 1/B sum_i [ dg_i / (e + u_i) + dh_i / (e + v_i) ]

with similarities c. This is not the derivative of L through gamma: u stands for the sum over the whole data set, and dL
is this batch's estimate of that loss's gradient. The row and column sums come from CLIP's sweep, and the rest is O(B)
arithmetic, in logarithms, because g ranges from e^-100 to e^100.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import (
    allocated,
    check_count,
    check_dense,
    check_features,
    check_floating_dtype,
    check_ids,
    check_norm,
    check_number,
    norm_bound,
)
from .._base.precision import wide_dtype
from ..comm import select_communicator
from ..contract import Checks, Inputs, KernelOptions, Options, Reduction, agree, entry, form_of_tensor, reduce_losses
from ..nodes import Bounds, Layout, Operands, Towers, row_statistics, statistics_fields
from ..sweep import Selection
from ._module import KernelLoss, Settings
from ._pairs import pairs_of_rows


class LossAndAverages(NamedTuple):
    """A loss, and the logarithms of the averages of this rank's pairs after this batch."""

    loss: Tensor
    image_log_averages: Tensor
    text_log_averages: Tensor


@entry
def global_contrastive_loss(
    image_features: Tensor,
    text_features: Tensor,
    image_log_averages: Tensor,
    text_log_averages: Tensor,
    *,
    temperature: Tensor | float = 0.07,
    gamma: float = 0.9,
    epsilon: float = 1e-14,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> LossAndAverages:
    r"""Return CLIP's loss with moving averages instead of the sums of the batch, for small batches.

    L   = t/2 mean_i [ log(e + u_i) + log(e + v_i) ],
    u_i = (1 - gamma) u_i' + gamma g_i,    g_i = mean_{j != i} exp((c_ij - c_ii) / t),

    with u' from earlier batches and v likewise over images; dL = t/2 mean_i [ dg_i / (e + u_i) + dh_i / (e + v_i) ].

    :class:`wholebatch.GlobalContrastiveLoss` keeps the averages for you.

    Args:
        image_features: X_r, (b_r, d), this rank's rows as they are: the caller normalizes. b_r may differ between
            ranks and may be 0. float64, float32, bfloat16 or float16.
        text_features: Y_r, (b_r, d); row i belongs to row i of X_r.
        image_log_averages: (b_r,), log u' of these images, -inf for new ones: u_i is then g_i.
        text_log_averages: (b_r,), log v' of these texts.
        temperature: t, divides the similarities; a positive number or a tensor of shape () or [1], the same on all
            ranks. A learned one gets the gradient log(e + u) + t dg/dt / (e + u), of each half.
        gamma: weight of this batch in the averages, 0 < gamma <= 1.
        epsilon: e, keeps the weights of solved examples finite; > 0.
        weights: (b_r,), one for each pair, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": L_i of this rank's pairs, (b_r,); see
            :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.global_contrastive_loss` on the
        concatenated batch; and log u and log v of this rank's pairs, (b_r,) each, in float64, without gradient: a
        named tuple (loss, image_log_averages, text_log_averages).

    L is differentiated with the gradient above. The meaning of `sync`, collectives, work and memory are those of
    :func:`wholebatch.functional.clip_loss`. A pair without negatives has loss 0, and keeps its averages.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for averages that are NaN or not one for each pair, and a temperature, gamma or epsilon out of range.
        RuntimeError: if the gradient is differentiated again.

    Source: Yuan et al., 2022, arXiv:2202.12387, algorithm 1; for two towers, Wei et al., 2024, arXiv:2407.01445.

    >>> import torch, wholebatch as wb
    >>> x, new = torch.eye(3), torch.full((3,), -torch.inf)
    >>> loss, *_ = wb.functional.global_contrastive_loss(x, x, new, new, temperature=0.5)
    >>> loss
    tensor(-1.)
    """
    averages = {"image_log_averages": image_log_averages, "text_log_averages": text_log_averages}

    def check() -> dict[str, Any]:
        for name, value in averages.items():
            _check_averages(name, value, len(image_features))
        return _check(gamma, epsilon)

    def read_back() -> dict[str, Tensor]:
        return {name: norm_bound(_known_averages(value)[:, None]) for name, value in averages.items()}

    def derive(numbers: Mapping[str, float]) -> dict[str, Any]:
        for name, value in averages.items():
            check_norm(name, _known_averages(value), numbers[name])
        return {}

    facts = agree(
        "global_contrastive_loss",
        Options(reduction=reduction, **options),
        Inputs(
            features={"image_features": image_features, "text_features": text_features},
            scalars={"temperature": temperature},
            weights=(weights, "image_features"),
            positive=("temperature",),
            paired=("image_features", "text_features"),
        ),
        Checks(
            check,
            read_back,
            derive,
            must_match=("gamma", "epsilon"),
            settings=(gamma, epsilon, *map(form_of_tensor, averages.values())),
            reads="the averages are checked",
        ),
    )
    rows = facts.rows["image_features"]
    sides = row_statistics(
        facts,
        (1 / facts.scalars["temperature"], 1 / facts.inputs["temperature"]),
        Operands(
            [facts.inputs["image_features"], facts.inputs["text_features"]],
            Towers(stays=(0,), travels=(1,)),
            Layout(rows, rows),
        ),
        Selection(pairs_of_rows(rows.rows(facts.rank), None, "positive")),
        Bounds(facts.norms["image_features"] * facts.norms["text_features"]),
        rows=statistics_fields(),
        cols=statistics_fields(target=False),
    )
    assert sides[0] is not None
    target = sides[0].target
    assert target is not None
    before = [x.detach().to(facts.device, wide_dtype(facts.device)) for x in (image_log_averages, text_log_averages)]
    if rows.total == 1:
        return LossAndAverages(reduce_losses(facts, 0 * target, 1), before[0], before[1])
    losses, after = [], []
    for side, log_average in zip(sides, before, strict=True):
        assert side is not None
        log_g = side.logsumexp - target - math.log(rows.total - 1)
        average = _average(log_average, log_g.detach(), gamma)
        log_weight = torch.logaddexp(average, torch.full_like(average, math.log(epsilon)))
        ratio = (log_g - log_weight).exp()  # g / (e + u), whose gradient is dg / (e + u)
        losses.append(facts.inputs["temperature"] * (log_weight + (ratio - ratio.detach())))
        after.append(average)
    return LossAndAverages(reduce_losses(facts, (losses[0] + losses[1]) / 2, rows.total), after[0], after[1])


def _average(before: Tensor, log_g: Tensor, gamma: float) -> Tensor:
    """Return log((1 - gamma) u + gamma g) from log u and log g; log g where there is no u."""
    if gamma == 1:
        return log_g
    both = torch.logaddexp(before + math.log1p(-gamma), log_g + math.log(gamma))
    return torch.where(before.isneginf(), log_g, both)


def _check(gamma: float, epsilon: float) -> dict[str, float]:
    if not 0 < check_number("gamma", gamma) <= 1:
        raise ValueError(f"gamma must lie in (0, 1], got {gamma}; it is the weight of this batch in the averages")
    if check_number("epsilon", epsilon) <= 0:
        raise ValueError(f"epsilon must be positive, got {epsilon}; 1e-14 is small enough")
    return {"gamma": gamma, "epsilon": epsilon}


def _check_averages(name: str, value: object, rows: int) -> None:
    if isinstance(value, Tensor):
        check_dense(name, value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.shape != (rows,):
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must be a floating-point tensor of shape ({rows},), one for each pair, got {got}")


def _known_averages(averages: Tensor) -> Tensor:
    """Return the averages with 0 instead of the -inf of new pairs."""
    return averages.masked_fill(averages.isneginf(), 0.0)


class GlobalContrastiveLoss(KernelLoss, check=_check):
    """Global contrastive loss that keeps the averages of all examples of the data set, the same on all ranks.

    Args:
        examples: the size of the data set.
        dtype: of the averages; 8 bytes per example in float32.
        temperature: as in :class:`wholebatch.NTXentLoss`, also for a learned one.

    Attributes:
        image_log_averages, text_log_averages: (examples,), log u and log v; -inf for examples that never were in a
            batch. They are buffers, saved with the model. They change in training mode while gradients are enabled.
            Keep this module out of activation checkpointing: it repeats the forward pass from changed averages.

    Raises:
        ValueError: if `examples` is not a positive integer.
    """

    temperature: Tensor | float = 0.07
    gamma: float = 0.9
    epsilon: float = 1e-14

    def __init__(
        self,
        examples: int,
        *,
        dtype: torch.dtype = torch.float32,
        temperature: Tensor | float = 0.07,
        gamma: float = 0.9,
        epsilon: float = 1e-14,
        reduction: Reduction = "mean",
        **options: Unpack[KernelOptions],
    ) -> None:
        Settings.__init__(self, reduction=reduction, temperature=temperature, gamma=gamma, epsilon=epsilon, **options)
        check_count("examples", examples, "the size of the data set")
        check_floating_dtype("dtype", dtype)
        self.image_log_averages: Tensor
        self.text_log_averages: Tensor
        for name in ("image_log_averages", "text_log_averages"):
            self.register_buffer(name, allocated("examples", (examples,), dtype=dtype).fill_(-torch.inf))

    @entry
    def forward(
        self, image_features: Tensor, text_features: Tensor, indices: Tensor, *, weights: Tensor | None = None
    ) -> Tensor:
        """See :func:`wholebatch.functional.global_contrastive_loss`: (b_r, d), (b_r, d), (b_r,) -> L.

        Args:
            image_features: as there.
            text_features: as there.
            indices: (b_r,) integers, the positions of these examples in the data set. If a position occurs several
                times in a batch, the last one's average is kept.
            weights: as there.

        Raises:
            ValueError: on every rank: as there; also for indices that are no integers, not one for each pair, or
                outside the data set.
        """
        comm, examples = select_communicator(self.group), len(self.image_log_averages)

        def check() -> dict[str, Any]:
            check_features("image_features", image_features)
            check_ids("indices", indices, "image_features", len(image_features))
            if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < examples:
                raise ValueError(
                    f"indices must lie between 0 and {examples - 1}, got {int(indices.min())} to {int(indices.max())}; "
                    "`examples` is the size of the whole data set"
                )
            learning = self.training and torch.is_grad_enabled()
            return {"rows": len(indices), "examples": examples, "learning": learning}

        everyone = comm.handshake(check, caller="GlobalContrastiveLoss", must_match=("examples", "learning"))
        positions = indices.to(self.image_log_averages.device, torch.int64)
        loss, *after = global_contrastive_loss(
            image_features,
            text_features,
            self.image_log_averages[positions],
            self.text_log_averages[positions],
            weights=weights,
            **self.settings,
        )
        if everyone[0]["learning"]:
            with torch.no_grad():
                counts = tuple(facts["rows"] for facts in everyone)
                all_positions = comm.all_gather(positions, counts=counts, check=False)
                distinct, place = all_positions.unique(return_inverse=True)
                order = torch.arange(len(place), device=positions.device)
                last = torch.zeros_like(distinct).scatter_reduce_(0, place, order, "amax")
                new = comm.all_gather(torch.stack(after, dim=1), counts=counts, check=False)[last]
                for averages, values in zip((self.image_log_averages, self.text_log_averages), new.T, strict=True):
                    averages[distinct] = values.to(averages)
        return loss
