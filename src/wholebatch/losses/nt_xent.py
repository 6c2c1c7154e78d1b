"""NT-Xent, SimCLR's loss: each row of two views against all other rows of both, with half of the tiles.

    z    = rows of both views of all ranks, each divided by its norm          2B of them
    S_ij = z_i . z_j / temperature
    L    = 1/(2B) sum_i [ logsumexp_{j != i} S_ij - S_{i p(i)} ]              p(i): the same example in the other view

S is symmetric: the tiles above its diagonal suffice, and the work is half of a full sweep's.
"""

from __future__ import annotations

from torch import Tensor
from typing_extensions import Unpack

from ..contract import Checks, KernelOptions, Options, Reduction, agree, entry, reduce_losses
from ..nodes.cross_entropy import one_positive
from ._declaration import Declaration, Sweep
from ._module import KernelLoss
from ._views import two_view_losses, two_views, two_views_inputs
from .statistics import report_statistics


@entry
def nt_xent_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    temperature: Tensor | float = 0.1,
    ids: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: Reduction = "mean",
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the cross-entropy of each row's other view among all other rows of both views, with its exact gradient.

    S = Z Z^T / temperature,    L = CE(S without its diagonal, other view),    Z = normalize([Z0; Z1]), all ranks' rows.

    Args:
        z0: (b_r, d), this rank's rows of the first view; they are normalized inside. b_r may differ between ranks and
            may be 0. float64, float32, bfloat16 or float16.
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        temperature: divides the cosines; a positive number or a tensor of shape () or [1], which may be learned; the
            same on all ranks.
        ids: (b_r,) integers; examples with equal ids are not negatives of each other.
        weights: (b_r,), one for each example, >= 0; the mean is sum w_i L_i / sum w_i over all ranks.
        reduction: "mean", "sum", or "none": the mean over both views of each of this rank's examples, (b_r,);
            see :func:`wholebatch.functional.clip_loss`.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, the same on every rank: `wholebatch.reference.nt_xent_loss` of the whole batch, at least in float32.

    Collectives: those of :func:`wholebatch.functional.clip_loss`, half a round with "ring". Work: 2 units of n_r N d
    multiply-adds per rank for this rank's n_r = 2 b_r rows of N = 2 B, half of a full sweep's 4; 1.5 where exp(S) is
    kept. Memory beyond inputs and gradients: this rank's rows of Z, two tiles and O(B), and on several ranks all of Z,
    its gradient, and a buffer of the reduce-scatter ("gather"), or five ranks' rows of Z ("ring").

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for a temperature that is not positive.
        RuntimeError: if the gradient is differentiated again.

    Source: Chen et al., 2020, arXiv:2002.05709, equation 1.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.nt_xent_loss(z, z, temperature=0.5)
    tensor(0.4327)
    """
    facts = agree(
        "nt_xent_loss",
        Options(reduction=reduction, **options),
        two_views_inputs(z0, z1, temperature=temperature, ids=ids, weights=weights),
        Checks(settings=()),
    )
    if not facts.statistics:
        return reduce_losses(facts, two_view_losses(facts), facts.rows["z0"].total)
    side = two_views(facts)
    assert side.target is not None
    losses = one_positive(side, side.target)
    report_statistics(facts.comm, 1 / facts.factor_of("temperature"), [(side, side.target)])
    return reduce_losses(facts, losses.unflatten(0, (2, -1)).mean(0), facts.rows["z0"].total)


class NTXentLoss(KernelLoss):
    """NT-Xent over the global batch: the settings of :func:`wholebatch.functional.nt_xent_loss`.

    Args:
        temperature: a number, or an `nn.Parameter` to be learned. Then wrap the module like the model, so that the
            engine synchronizes its gradient. A step may make a parameter negative, which raises at the next call; to
            learn one that stays positive, call the function with `temperature=1 / scale()` of a
            :class:`wholebatch.Scale`.
    """

    temperature: Tensor | float = 0.1

    @entry
    def forward(self, z0: Tensor, z1: Tensor, *, ids: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """See :func:`wholebatch.functional.nt_xent_loss`: (b_r, d), (b_r, d) -> L, the same on all ranks."""
        return nt_xent_loss(z0, z1, ids=ids, weights=weights, **self.settings)


DECLARATION = Declaration(nt_xent_loss, NTXentLoss, Sweep())
