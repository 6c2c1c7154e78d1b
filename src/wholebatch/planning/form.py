"""The form of a loss: what its memory and its work depend on, apart from sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from ..losses.catalog import CATALOG
from .sizes import LossName, num_towers


@dataclass(frozen=True)
class Form:
    """The form of a loss."""

    towers: int  # the number of feature matrices; 1 if the rows of X are the columns, too
    rows_per_example: int = 1  # of S
    symmetric: bool = False  # S holds features against themselves, so that half of its tiles suffice
    one_pass: bool = False  # S is computed once, with its gradient
    exact: bool = False  # exp(S) is kept unrounded: a row may have several positives, as labels give it
    similarities: int = 1  # the number of them, which share the numbers of a row
    tiles: int = 1  # how many times two tiles a step holds
    source: Any = None  # a `DeclaredLoss` as the user gave it; None: the loss is built in

    @property
    def keeps(self) -> bool:
        """Return whether exp(S) can be kept; that of a declared loss is not planned."""
        return not self.one_pass and self.source is None

    @property
    def work_units(self) -> int:
        """Return a step's multiply-adds, in units of (rows of S) x (columns of S) x d; a symmetric S takes half."""
        products = 3 if self.one_pass else 4
        return products // 2 if self.symmetric else products


@cache
def built_in(loss: LossName) -> Form:
    """Return the form of a loss in `sizes.LOSSES`."""
    entry = CATALOG.get(loss)
    if entry is None:
        return Form(num_towers(loss))
    assert entry.sweep is not None
    return Form(entry.inputs, entry.rows_per_example, entry.symmetric, entry.sweep.one_pass, entry.kind == "labeled")
