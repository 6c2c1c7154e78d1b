"""CurricularFace: an angular margin, and hard negatives that weigh more as training goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..._base.angular_margin import FOLDS, Fold
from ..._base.checks import check_choice, check_fraction, check_positive_number, check_weight
from .angular import angular
from .interface import Targets, check_targets


class CurricularFace(nn.Module):
    r"""CurricularFace, phi = cos(theta + m); a hard negative, c_j > cos(theta + m), is replaced by c_j (t + c_j).

    t: the running average of the targets' cosines over the global batches, in training. As it grows, hard negatives
    weigh more. Neither t nor the choice of hard negatives has a gradient.

    Args:
        s: multiplies all cosines.
        m: the margin, radians.
        alpha: the share of the new batch in the running average.
        fold: as in :class:`CombinedMargin`.

    Source: Huang et al., 2020, arXiv:2004.00288, equations 5 to 8.
    """

    t: Tensor

    def __init__(self, s: float = 64.0, m: float = 0.5, alpha: float = 0.01, *, fold: Fold = "extend") -> None:
        super().__init__()
        check_positive_number("s", s, "it multiplies cosines")
        check_weight("m", m, "0 is no margin")
        check_fraction("alpha", alpha)
        check_choice("fold", fold, FOLDS)
        self.s, self.m, self.alpha, self.fold = s, m, alpha, fold
        self.register_buffer("t", torch.zeros((), dtype=torch.float64))

    def extra_repr(self) -> str:
        return f"s={self.s}, m={self.m}, alpha={self.alpha}, fold={self.fold!r}"

    @torch.no_grad()
    def observe_angles(self, angles: Tensor) -> None:
        """Update the running average with the target angles of all ranks' rows."""
        if self.training and len(angles):
            self.t.lerp_(angles.cos().mean(), self.alpha)

    def forward(self, targets: Targets) -> Tensor:
        check_targets(targets)
        return angular(targets, 1.0, self.m, self.fold)

    def of_negatives(self, angles: Tensor) -> HardNegatives:
        """Return the transform of the negatives of rows with these target angles, (n, 1)."""
        return HardNegatives(self.s, self.t.clamp(-1.0, 1.0), (angles.detach() + self.m).cos().view(-1))


@dataclass(frozen=True)
class HardNegatives:
    """The transform of logits z = s c to z (t + c) where c > limit; its columns are the examples."""

    s: float
    t: Tensor  # (), an average of cosines
    limits: Tensor  # (n,)

    def transform_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by their transform, in place, and return them."""
        hard = self._is_hard(logits, cols)
        return torch.where(hard, logits * (self.t + logits / self.s), logits, out=logits)

    def slope_(self, logits: Tensor, cols: slice) -> Tensor:
        """Replace the logits by the derivative of the transform, in place, and return them."""
        easy = ~self._is_hard(logits, cols)
        return logits.mul_(2 / self.s).add_(self.t).masked_fill_(easy, 1.0)

    def bound(self, largest: float) -> float:
        """Return an upper bound of a transformed logit, from one of the logits."""
        return largest * (1.0 + largest / self.s)  # |t| <= 1; the host does not read t

    def _is_hard(self, logits: Tensor, cols: slice) -> Tensor:
        return logits > self.s * self.limits[cols].to(logits.dtype)
