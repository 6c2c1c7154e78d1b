"""Alignment and uniformity: two views should be near each other, and the rows of a view spread over the sphere.

    L = alignment + uniformity weight / 2 sum over views of U

    alignment = 1/B sum_i |x_i - y_i|^alpha                                    x, y: normalized rows of all ranks
    U         = log( 1/(B (B - 1)) sum_{i != j} exp(-t (2 - 2 x_i . x_j)) )    the exponent is -t |x_i - x_j|^2

One sweep over half of S = 2 t X X^T gives A_i = logsumexp_{j != i} S_ij, and U = logsumexp_i A_i - 2 t - log(B (B-1)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from .._base.checks import check_number, check_positive_number, check_weight
from .._base.normalize import UNIT, normalize_rows
from .._base.precision import wide_dtype
from ..contract import Checks, Facts, KernelOptions, Options, agree, entry, finish
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..nodes import Bounds, Layout, Operands, Towers, row_statistics, statistics_fields
from ..partition import Diagonal
from ..sweep import Diagonals, Memory, Pairs, Precision, Selection
from ..sync import total
from ._declaration import Declaration
from ._module import LossModule
from ._views import two_view_features


@entry
def alignment_uniformity_loss(
    z0: Tensor,
    z1: Tensor,
    *,
    alpha: float = 2.0,
    t: float = 2.0,
    uniformity: float = 1.0,
    **options: Unpack[KernelOptions],
) -> Tensor:
    r"""Return the distance of two views plus the log of the mean Gaussian potential of the rows of each view.

    L = mean_i |x_i - y_i|^alpha + uniformity / 2 sum_views log mean_{i != j} exp(-t |x_i - x_j|^2),
    x, y: all ranks' rows, normalized.

    Args:
        z0: (b_r, d), this rank's rows of the first view; normalized inside. b_r may differ between ranks and may be 0.
            float64, float32, bfloat16 or float16.
        z1: (b_r, d), the second view; row i is another view of row i of z0.
        alpha: power of the distance of views, >= 1.
        t: sharpness of the potential, > 0.
        uniformity: weight of the second term, >= 0.
        **options: see :class:`wholebatch.options.KernelOptions`.

    Returns:
        L, a scalar, the same on every rank: the value of `wholebatch.reference.alignment_uniformity_loss` on the
        concatenated batch. Its dtype is that of the features, float32 for half precision. With one row in all,
        the second term is 0.

    Collectives: those of two symmetric sweeps, as in :func:`wholebatch.functional.nt_xent_loss`, and 5 all-reduces of a
    number. Work: 2 units of b B d multiply-adds per view and rank. Memory: as there, with b rows.

    Raises:
        ValueError: on every rank, whichever rank made the mistake: as in :func:`wholebatch.functional.clip_loss`;
            also for options out of range.
        RuntimeError: if the gradient is differentiated again.

    Source: Wang and Isola, 2020, arXiv:2005.10242, section 4; the mean over pairs leaves i = j out, as their code does.

    >>> import torch, wholebatch as wb
    >>> z = torch.eye(3)
    >>> wb.functional.alignment_uniformity_loss(z, z)
    tensor(-4.)
    """
    facts = agree(
        "alignment_uniformity_loss",
        Options(**options),
        two_view_features(z0, z1),
        Checks.of(_check, alpha=alpha, t=t, uniformity=uniformity),
    ).widened()
    x, y = (normalize_rows(facts.inputs[name]) for name in ("z0", "z1"))
    distances = torch.linalg.vector_norm(x - y, dim=1).to(wide_dtype(facts.device)) ** alpha
    loss = total(facts.comm, distances.sum()) / facts.rows["z0"].total
    if uniformity:
        potentials = _log_potential(facts, "z0", t) + _log_potential(facts, "z1", t)
        loss = loss + uniformity / 2 * potentials
    return finish(facts, loss)


def _log_potential(facts: Facts, name: str, t: float) -> Tensor:
    """Return U of one view, shape ()."""
    rows = facts.rows[name]
    local = rows.rows(facts.rank)
    itself = Diagonals(Diagonal(0, local.start, local.stop - local.start))
    twice = 2 * float(t)  # integers beyond 2^63 are no numbers of torch
    side, _ = row_statistics(
        facts,
        (twice, twice),
        Operands(
            [facts.inputs[name]],
            Towers(stays=(0,), normalize=True),
            Layout(rows, rows, symmetric=True),
            narrow=True,
        ),
        Selection(Pairs(excluded=itself)),
        Bounds(UNIT),
        rows=statistics_fields(target=False),
    )
    assert side is not None
    if rows.total == 1:
        return side.logsumexp[:0].sum()
    with torch.no_grad():
        largest = torch.cat([side.logsumexp, side.logsumexp.new_full((1,), -math.inf)]).amax()
        largest = facts.comm.all_reduce(largest, "max", check=False)
    potential = total(facts.comm, (side.logsumexp - largest).exp().sum()).log() + largest
    return potential - twice - math.log(rows.total * (rows.total - 1))


def _check(alpha: float, t: float, uniformity: float) -> None:
    if check_number("alpha", alpha) < 1:
        raise ValueError(f"alpha must be at least 1, got {alpha}; below that the gradient is infinite at distance 0")
    check_positive_number("t", t, "it multiplies squared distances")
    check_weight("uniformity", uniformity, "it weighs the second term; 0 leaves it out")


class AlignmentUniformityLoss(LossModule, check=_check):
    """The distance of two views and the uniformity of each over the global batch."""

    alpha: float = 2.0
    t: float = 2.0
    uniformity: float = 1.0
    exchange: ExchangeName = "auto"
    memory: Memory = "auto"
    kernel: Kernel = "auto"
    precision: Precision = "auto"

    @entry
    def forward(self, z0: Tensor, z1: Tensor) -> Tensor:
        """Return L, the same on all ranks, from (b_r, d) and (b_r, d): the function with this module's settings."""
        return alignment_uniformity_loss(z0, z1, **self.settings)


DECLARATION = Declaration(alignment_uniformity_loss, AlignmentUniformityLoss)
