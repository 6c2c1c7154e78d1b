"""Terms of :class:`wholebatch.PairLoss`: reductions over the candidates of a row or column, and its partner.

Masks that the engine recognizes have names here; a function of one's own that compares the same integers is recognized
as well, see `wholebatch.pair_loss.masks`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ._base.settings import shown
from .pair_loss.reductions import Count, LogSumExp, Mask, Max, Mean, Min, Partner, Sum

__all__ = ["Count", "LogSumExp", "Max", "Mean", "Min", "Partner", "Sum", "equal", "other", "unequal"]


def other(x: Any = None, y: Any = None) -> Tensor:  # fields
    """Return the mask of all pairs but those of a row with itself: `x.index != y.index`.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.PairLoss({"n": wb.terms.Count(wb.terms.other)}, lambda r, x, p: r.n)
    >>> loss_fn(torch.zeros(4, 2))
    tensor(3.)
    """
    if x is None:
        raise TypeError("wb.terms.other is a mask itself: write where=wb.terms.other, without parentheses")
    mask: Tensor = x.index != y.index
    return mask


def equal(name: str) -> Mask:
    """Return the mask of pairs with equal numbers of this name: `lambda x, y: x.label == y.label` for "label".

    Raises:
        ValueError: for a name that data cannot have.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.PairLoss({"n": wb.terms.Count(wb.terms.equal("label"))}, lambda r, x, p: r.n)
    >>> loss_fn(torch.zeros(4, 2), x_data={"label": torch.tensor([0, 0, 0, 1])})
    tensor(2.5000)
    """
    return partial(_compared, name=_checked(name), equal=True)


def unequal(name: str) -> Mask:
    """Return the mask of pairs with different numbers of this name.

    Raises:
        ValueError: for a name that data cannot have.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.PairLoss({"n": wb.terms.Count(wb.terms.unequal("label"))}, lambda r, x, p: r.n)
    >>> loss_fn(torch.zeros(4, 2), x_data={"label": torch.tensor([0, 0, 0, 1])})
    tensor(1.5000)
    """
    return partial(_compared, name=_checked(name), equal=False)


def _compared(x: Any, y: Any, *, name: str, equal: bool) -> Tensor:  # fields
    mask: Tensor = x[name] == y[name] if equal else x[name] != y[name]
    return mask


def _checked(name: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"name must be that of numbers in x_data and y_data, such as 'label', got {shown(name)}")
    return name
