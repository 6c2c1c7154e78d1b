"""Rows of earlier batches as further columns: a cross-batch memory, with labels.

    columns = this batch's rows, then the last rows of earlier batches, without a gradient
    L = mean over i with a positive of  log sum_j exp(s_ij / T) - mean over positives j of s_ij / T

over the columns of all ranks that are not the same example. Each rank remembers its own rows, so a memory of m rows on
W ranks holds W m, and no rank stores another's. Rows are remembered as they were: begin when they change slowly.

Source: Wang et al., 2020, arXiv:1912.06798; the loss is that of Khosla et al., 2020, arXiv:2004.11362.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.checks import has_feature_dtype, is_dense
from .._base.settings import check_divisor, check_integer, shown
from ..pair_loss import PairLoss
from ..terms import Count, LogSumExp, Mean


class RowMemory:
    """The last rows of this rank, with their data; the oldest make room for new ones.

    It is no module: a checkpoint does not hold it, and DistributedDataParallel does not make it the same on all ranks.

    Args:
        rows: how many it holds, on this rank.

    Raises:
        ValueError: for a number of rows that is no positive integer.

    >>> import torch, wholebatch as wb
    >>> memory = wb.recipes.RowMemory(3)
    >>> memory.append(torch.eye(2), {"label": torch.tensor([0, 1])})
    >>> memory.append(torch.ones(2, 2), {"label": torch.tensor([2, 3])})
    >>> columns, data = memory.columns(torch.zeros(1, 2), {"label": torch.tensor([4])})
    >>> data["label"]
    tensor([4, 1, 2, 3])
    """

    def __init__(self, rows: int) -> None:
        self.rows = check_integer("rows", rows, minimum=1, of="rows that this rank remembers")
        self._features: Tensor | None = None
        self._data: dict[str, Tensor] = {}

    def __len__(self) -> int:
        return 0 if self._features is None else len(self._features)

    def append(self, features: Tensor, data: Mapping[str, Tensor]) -> None:
        """Remember rows, after the step that used them; nothing is sent, and a mistake raises on this rank alone.

        Args:
            features: (b, d).
            data: numbers of the rows by name, (b,) each: always the same names.

        Raises:
            ValueError: if features or data do not fit those before.
        """
        features, data = self._checked(features, data)
        if self._features is not None:
            features = torch.cat([self._features, features.to(self._features)])
            data = {name: torch.cat([old, data[name].to(old)]) for name, old in self._data.items()}
        self._features = features[-self.rows :].clone()
        self._data = {name: x[-self.rows :].clone() for name, x in data.items()}

    def columns(self, features: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the rows of a batch followed by those remembered, (b + m, d), and their data, (b + m,) each.

        Raises:
            ValueError: as for `append`.
        """
        self._checked(features, data)
        if self._features is None:
            return features, dict(data)
        columns = torch.cat([features, self._features.to(features)])
        return columns, {name: torch.cat([x, self._data[name].to(x)]) for name, x in data.items()}

    def _checked(self, features: Tensor, data: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return features and data without their graphs."""
        if not is_dense(features) or not has_feature_dtype(features) or features.dim() != 2:
            kind = f"{tuple(features.shape)}, {features.dtype}" if is_dense(features) else shown(features)
            raise ValueError(f"features must be a floating-point matrix (rows, embedding size), got {kind}")
        if self._features is not None and features.shape[1] != self._features.shape[1]:
            raise ValueError(
                f"features must have {self._features.shape[1]} columns like the rows before, got {features.shape[1]}"
            )
        if not isinstance(data, Mapping) or (self._features is not None and set(data) != set(self._data)):
            names = sorted(map(str, data)) if isinstance(data, Mapping) else shown(data)
            raise ValueError(f"data must have the names {sorted(self._data)} like the rows before, got {names}")
        for name, x in data.items():
            if not is_dense(x) or tuple(x.shape) != (len(features),):
                got = tuple(x.shape) if is_dense(x) else shown(x)
                raise ValueError(
                    f"data[{name!r}] of a RowMemory must be a vector with a number for each of {len(features)} rows, "
                    f"got {got}"
                )
            if name in self._data and x.dtype != self._data[name].dtype:
                before = self._data[name].dtype
                raise ValueError(f"data[{name!r}] of a RowMemory must be {before} like earlier rows, got {x.dtype}")
        return features.detach(), {name: x.detach() for name, x in data.items()}


def memory_sup_con(*, temperature: float = 0.1, **options: Any) -> PairLoss:  # of PairLoss
    """Return the supervised contrastive loss of a batch against itself and earlier batches.

    Args:
        temperature: > 0; similarities are cosines.
        **options: group, sync, exchange, memory, reduction, precision of :class:`wholebatch.PairLoss`.

    Returns:
        A loss of (features, columns) with integers `label` and `example` in `x_data` and `y_data`, where columns and
        their data are those of :class:`wholebatch.recipes.RowMemory`. Equal labels are positives, equal examples are
        left out. A row without a positive does not count.

    Raises:
        ValueError: for a temperature that is not positive.
    """
    temperature = check_divisor("temperature", temperature)
    return PairLoss(
        {
            "all": LogSumExp(_logit, where=_other_example),
            "positives": Mean(_logit, where=_positive),
            "count": Count(where=_positive),
        },
        _sup_con,
        similarity="cosine",
        parameters={"temperature": temperature},
        **options,
    )


def _logit(s: Any, x: Any, y: Any, p: Any) -> Tensor:  # similarity and fields
    logit: Tensor = s / p.temperature
    return logit


def _other_example(x: Any, y: Any) -> Tensor:  # fields
    other: Tensor = x.example != y.example
    return other


def _positive(x: Any, y: Any) -> Tensor:  # fields
    same: Tensor = x.label == y.label
    return same & _other_example(x, y)


def _sup_con(r: Any, x: Any, p: Any) -> tuple[Tensor, Tensor]:  # fields
    some = r.count > 0
    return torch.where(some, r.all - r.positives, 0.0), some.to(r.all.dtype)
