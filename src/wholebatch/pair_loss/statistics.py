"""Statistics of a declared loss: the means of its terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class TermStatistics(NamedTuple):
    """The mean of each term over the rows, and columns, of all ranks that have candidates; `wb.with_statistics`.

    Attributes:
        rows: scalars without gradient, the same on all ranks, by the names of the terms that row_loss reads. NaN where
            no row has a candidate.
        columns: likewise of column_loss.
    """

    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
