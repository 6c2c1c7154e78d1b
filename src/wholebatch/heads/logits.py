r"""The settings that define a classifier's logits, and checks of labels and centers before any is computed.

    z_ij = s c_ij n_i m_j + b_j             negative class j,    c_ij: cosine of embedding i and center j
    z_iy = s phi(theta_iy) n_i m_y + b_y    target class y,      theta: their angle, phi: the margin

with n_i = |x_i| if embeddings are not normalized, else 1, and m_j = |w_j| if centers are not, else 1. ArcFace and all
later margins normalize both. SphereFace as published normalizes centers. With neither, a logit is
s x_i . w_j + b_j: a linear classifier, and with a margin the large-margin softmax (Liu et al., 2016, arXiv:1612.02295).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, get_args

from torch import Tensor, nn

from .._base.checks import (
    check_choice,
    check_dense,
    check_features,
    check_finite,
    check_ignore_index,
    check_label_smoothing,
    check_positive_number,
    check_real,
    is_dense,
    shown,
)
from .._base.normalize import known_norms
from ..contract import Facts
from .margins.interface import Margin, Targets, TransformsNegatives

GRADIENTS = ("exact", "straight_through")
Normalize = Literal["both", "centers", "embeddings", "none"]


@dataclass(frozen=True)
class Logits:
    """The settings of logits, as in :func:`wholebatch.functional.partial_fc_loss`."""

    margin: Margin
    margin_grad: str = "exact"
    normalize: Normalize = "both"
    exclude_above: float | None = None
    label_smoothing: float = 0.0
    ignore_index: int = -100

    @property
    def unit_embeddings(self) -> bool:
        """Whether embeddings are normalized."""
        return self.normalize in ("both", "embeddings")

    @property
    def unit_centers(self) -> bool:
        """Whether centers are normalized."""
        return self.normalize in ("both", "centers")

    @property
    def clamp(self) -> tuple[bool, bool]:
        """The argument `clamp` of `angles.target_angles`."""
        return self.unit_embeddings, self.unit_centers

    def check(self) -> None:
        """Raise ValueError unless each setting is valid and compatible with the others."""
        margin, cosine = self.margin, self.exclude_above
        if not callable(margin) or isinstance(margin, type) or not hasattr(margin, "s"):
            raise ValueError(f"margin must be one such as wholebatch.ArcFace(), with a scale s; got {shown(margin)}")
        check_positive_number("the margin's scale s", margin.s, "it multiplies cosines")
        if isinstance(margin, nn.Module) and any(True for _ in margin.parameters()):
            raise ValueError(
                "a margin must have no parameters to learn, because no engine would average their gradients; got "
                f"{type(margin).__name__} with parameters: make them buffers"
            )
        check_choice("margin_grad", self.margin_grad, GRADIENTS)
        check_choice("normalize", self.normalize, get_args(Normalize))
        check_label_smoothing(self.label_smoothing)
        check_ignore_index(self.ignore_index)
        if cosine is not None and not -1.0 <= check_real("exclude_above", cosine) <= 1.0:
            raise ValueError(f"exclude_above must be a cosine from -1 to 1, or None; got {cosine!r}")
        name = type(margin).__name__
        if cosine is not None and isinstance(margin, TransformsNegatives):
            raise ValueError(
                f"exclude_above must be None with {name}, which transforms the logits of negatives, got {cosine!r}; "
                "use another margin, or pass None"
            )
        if self.normalize != "both" and (cosine is not None or isinstance(margin, TransformsNegatives)):
            raise ValueError(
                f"normalize must be 'both' with {name if cosine is None else 'exclude_above'}, which uses the cosines "
                f"of negatives, got {self.normalize!r}; pass 'both'"
            )

    def form(self) -> tuple[Hashable, ...]:
        """Return all that `check` and `facts` depend on."""
        margin, settings = self.margin, [getattr(self, name) for name in SETTINGS[1:]]
        learned = isinstance(margin, nn.Module) and any(True for _ in margin.parameters())
        return type(margin), _shown(margin), getattr(margin, "s", None), learned, *settings

    def check_sub_centers(self, count: int) -> None:
        """Raise ValueError for several sub-centers of centers that are not normalized.

        The nearest sub-center would then not be the one with the largest logit.
        """
        if count > 1 and not self.unit_centers:
            raise ValueError(
                f"sub-centers are compared as unit vectors: normalize must be 'both' or 'centers', got "
                f"{self.normalize!r}"
            )

    def target_logits(self, targets: Targets, lengths: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return the logits of target classes, (b_r, k).

        `lengths`, (b_r, k), are the norms of the target centers; None if centers are normalized.
        """
        phi = self.margin(targets)
        if self.margin_grad == "straight_through":
            cosines = targets.angles.cos()
            phi = cosines + (phi - cosines).detach()
        logits = self.margin.s * phi
        if not self.unit_embeddings:
            logits = logits * targets.norms
        if lengths is not None:
            logits = logits * lengths
        return logits if bias is None else logits + bias

    def facts(self) -> dict[str, Any]:
        """Return the settings that must be the same on all ranks; the margin as its repr or the name of its type."""
        return {
            "margin": _shown(self.margin),
            "margin_grad": self.margin_grad,
            "normalize": self.normalize,
            "exclude_above": self.exclude_above,
            "label_smoothing": float(self.label_smoothing),
            "ignore_index": self.ignore_index,
        }


SETTINGS = tuple(field.name for field in fields(Logits))  # the names of `facts`
SIZES = ("num_classes", "embedding_size", "sub_centers", "bias", "seed")  # the names of `PartialFC.size_facts`
OF_HEAD = (*SETTINGS, *SIZES)  # the names of the facts that are the same for the head's parts on all ranks


def _shown(margin: Margin) -> str:
    return repr(margin) if is_dataclass(margin) or isinstance(margin, nn.Module) else type(margin).__qualname__


def ends_of(norms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest norm, shape (); 1 and 0 without rows."""
    if not len(norms):
        return norms.new_ones(()), norms.new_zeros(())
    return norms.aminmax()


def check_directions(name: str, x: Tensor, least: float, largest: float) -> None:
    """Raise ValueError if x has a row that is NaN, infinite or 0; `least` and `largest` are norms of its rows."""
    if not math.isfinite(largest):
        check_finite(name, x)
    if least == 0:
        zero = (known_norms(x) == 0).flatten().nonzero()
        raise ValueError(
            f"{name} must not have a row of zeros, which has no direction; row {int(zero[0])} is one"
            f"{'' if len(zero) == 1 else f', and {len(zero) - 1} others are'}"
        )


def check_several(labels: object, num_classes: int | None) -> int:
    """Return the number of labels that an example may have, from the shape of `labels`."""
    if not is_dense(labels) or labels.dim() != 2:
        return 1
    if not labels.shape[1]:
        raise ValueError(f"labels must have shape (rows,) or (rows, k), k >= 1, got {tuple(labels.shape)}")
    if num_classes is not None and labels.shape[1] >= num_classes:
        raise ValueError(
            f"labels must have shape (rows,), or (rows, k) with k < {num_classes} classes, got {tuple(labels.shape)}, "
            "which leaves no negatives; for one-hot rows pass the argmax"
        )
    return labels.shape[1]


def repeated(labels: Tensor, ignore_index: int) -> Tensor:
    """Return how many of the labels, (n, k), repeat another label of the same example, shape ()."""
    ordered = labels.sort(1).values
    return ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != ignore_index)).sum()


def check_different(repetitions: float) -> None:
    """Raise ValueError if an example has a label twice."""
    if repetitions:
        raise ValueError(
            f"labels of an example must be different ones, got {repetitions:.0f} repetitions; fill up with "
            "ignore_index, and for one-hot rows pass the argmax"
        )


def check_labels(facts: Facts, classes: int) -> None:
    """Raise ValueError unless the labels of all ranks are ids of classes."""
    for rank, ends in enumerate(facts.of_ranks("labels")):
        for label in ends or ():
            if not 0 <= label < classes:
                raise ValueError(
                    f"{facts.caller}: labels must lie in [0, {classes}), or be ignore_index; rank {rank} got {label}"
                )


def flat(centers: Tensor) -> tuple[Tensor, int]:
    """Return centers as a matrix, (C_r, d) -> (C_r, d) or (C_r, K, d) -> (C_r K, d), and K; refuse other shapes."""
    if not isinstance(centers, Tensor) or centers.dim() != 3:
        check_features("centers", centers)
        return centers, 1
    check_dense("centers", centers)
    if not centers.shape[1]:
        raise ValueError(f"centers must have shape (C_r, d), or (C_r, K, d) with K >= 1, got {tuple(centers.shape)}")
    matrix = centers.flatten(0, 1)
    check_features("centers", matrix)
    return matrix, centers.shape[1]
