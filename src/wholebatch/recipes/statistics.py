"""Sums over the rows of all ranks that a loss squares: their mean over ranks would be another loss.

    FLOPS     sum_k (1/B sum_i |a_ik|)^2                       few active features, evenly used
    SIGReg    mean over directions u of the Epps-Pulley distance of the projections X u from a standard normal:
                  B sum_k w_k |1/B sum_i exp(i t_k x_i . u) - exp(-t_k^2 / 2)|^2
                  t_k: knots in [0, 3],    w_k = 2 exp(-t_k^2 / 2) by the trapezoid rule (both signs of t)

One all-reduce of these sums makes them exact on any number of ranks. Any other statistic can be written like them.

Source: Paria et al., 2020, arXiv:2004.05665; Balestriero and LeCun, 2025, arXiv:2511.08544.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._base.checks import check_features, is_dense
from .._base.settings import check_integer
from ..contract import Checks, Inputs, agree, entry
from ..losses._module import LossModule
from ..losses._moments import shared_loss
from ..sync import shared_sum

_LARGEST_KNOT, _MOST_KNOTS = 3.0, 10_000


class FLOPSLoss(LossModule):
    """The sum of squares of the mean activation of each feature, over the rows of all ranks.

    L = sum_k (1/B sum_i |a_ik|)^2

    >>> import torch, wholebatch as wb
    >>> wb.recipes.FLOPSLoss()(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    tensor(4.)
    """

    @entry
    def forward(self, activations: Tensor) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            activations: (b_r, d), this rank's rows. b_r may differ between ranks and may be 0.

        Collectives: forward 1 handshake and 1 all-reduce of d numbers; backward the same. Memory: O(b_r d).
        """
        facts = agree("FLOPSLoss", self.options, Inputs(features={"activations": activations}), Checks(settings=()))
        x = facts.inputs["activations"].to(facts.dtype)
        mean = shared_sum(facts.comm, x.abs().sum(0)) / facts.rows["activations"].total
        return shared_loss(facts, mean.square().sum())

    def reference(self, activations: Tensor) -> Tensor:
        """Return L of the rows given, without communication."""
        return activations.abs().mean(0).square().sum()


def _check_knots(knots: int) -> None:
    check_integer("knots", knots, minimum=2, maximum=_MOST_KNOTS)


class SIGRegLoss(LossModule, check=_check_knots):
    """The distance of the projections of all ranks' rows from a standard normal distribution.

    L = mean over u of B sum_k w_k |1/B sum_i exp(i t_k x_i . u) - exp(-t_k^2 / 2)|^2

    Args:
        knots: number of t_k, from 2 to 10,000, evenly from 0 to 3.

    >>> import torch, wholebatch as wb
    >>> made, loss_fn = torch.Generator().manual_seed(0), wb.recipes.SIGRegLoss()
    >>> normal = torch.randn(500, 2, generator=made)
    >>> [round(loss_fn(x, torch.eye(2)).item(), 1) for x in (normal, 3 * normal)]
    [0.5, 251.9]
    """

    knots: int = 17

    @entry
    def forward(self, features: Tensor, directions: Tensor) -> Tensor:
        """Return L, the same on all ranks.

        Args:
            features: (b_r, d), this rank's rows. b_r may differ between ranks and may be 0.
            directions: u, (m, d), the same on all ranks: draw others for each step, with the same seed on each rank.
                They are divided by their norms.

        Collectives: forward 1 handshake and 1 all-reduce of 2 m knots numbers; backward the same. Memory: O(b_r m
        knots).
        """
        facts = agree(
            "SIGRegLoss",
            self.options,
            Inputs(features={"features": features}, parameters={"directions": directions}),
            Checks(
                check=lambda: self._check_directions(features, directions),
                must_match=("knots",),
                settings=(self.knots,),
            ),
        )
        x, count = facts.inputs["features"].to(facts.dtype), facts.rows["features"].total
        sums = self._waves(x, facts.inputs["directions"].to(facts.dtype))
        return shared_loss(facts, self._distance(shared_sum(facts.comm, sums) / count, count))

    def reference(self, features: Tensor, directions: Tensor) -> Tensor:
        """Return L of the rows given, without communication."""
        count = len(features)
        return self._distance(self._waves(features, directions) / count, count)

    def _points(self, like: Tensor) -> Tensor:
        """Return t_k, (knots,)."""
        return torch.linspace(0, _LARGEST_KNOT, self.knots, dtype=like.dtype, device=like.device)

    def _waves(self, x: Tensor, directions: Tensor) -> Tensor:
        """Return the sums over rows of the real and the imaginary part of exp(i t_k x_i . u), (2, m, knots)."""
        projections = x @ torch.nn.functional.normalize(directions, dim=1).T
        angles = projections[:, :, None] * self._points(x)
        return torch.stack([angles.cos().sum(0), angles.sin().sum(0)])

    def _distance(self, mean: Tensor, count: int) -> Tensor:
        """Return L from the means over rows of the same numbers."""
        t = self._points(mean)
        normal = (-t.square() / 2).exp()
        weights = 2 * normal * _LARGEST_KNOT / (self.knots - 1)
        weights[[0, -1]] /= 2
        distance = (mean[0] - normal).square() + mean[1].square()
        return count * (distance @ weights).mean()

    def _check_directions(self, features: Tensor, directions: Tensor) -> dict[str, object]:
        wide = features.shape[1] if is_dense(features) and features.dim() == 2 else "d"
        check_features("directions", directions)
        if not len(directions) or directions.shape[1] != wide:
            got = tuple(directions.shape)
            raise ValueError(f"directions must have shape (m, {wide}), as many columns as features, got {got}")
        return {"knots": self.knots}
