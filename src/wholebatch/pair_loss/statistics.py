"""Statistics of a declared loss: the means of its terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor


class TermStatistics(NamedTuple):
    """The mean of each term over the rows, and over the columns, of all ranks; from :func:`wholebatch.with_statistics`.

    A LogSumExp, Max or Min over no candidates is infinite, and such rows are left out; a Mean, Sum or Count is 0 there,
    and counts.

    Attributes:
        rows: scalars without gradient, the same on all ranks, by the names of the terms that row_loss reads. NaN where
            all are left out.
        columns: likewise of column_loss.
    """

    rows: Mapping[str, Tensor]
    columns: Mapping[str, Tensor]
