"""The settings of margins that are functions of the angle alone, cos(m1 theta + m2) - m3, for torch and for JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .settings import check_choice, check_number

Fold = Literal["extend", "linear", "clip", "none"]
FOLDS = ("extend", "linear", "clip", "none")


@dataclass(frozen=True)
class AngularMargin:
    """The settings of `CombinedMargin`, which says what they mean."""

    s: float
    m1: float
    m2: float
    m3: float
    fold: Fold = "extend"

    def __post_init__(self) -> None:
        for name in ("s", "m1", "m2", "m3"):
            check_number(name, getattr(self, name))
        if self.s <= 0 or self.m1 <= 0:
            raise ValueError(f"s and m1 must be positive, got s={self.s} and m1={self.m1}")
        if self.m2 < 0 or self.m3 < 0:
            raise ValueError(f"m2 and m3 must not be negative, got m2={self.m2} and m3={self.m3}")
        check_choice("fold", self.fold, FOLDS)
        if self.fold == "linear" and self.m1 != 1:
            raise ValueError(f"fold='linear' is defined for m1=1 only, got m1={self.m1}; pass fold='extend'")
