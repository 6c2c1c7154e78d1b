"""The losses of the package grad_cache, by :func:`wholebatch.functional.info_nce_loss`.

    L = CE(x y^T, (n + 1) i),    x: queries,    y: for each query its passage and n hard negatives, in a row

With DistributedContrastiveLoss, x and y are the rows of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb

from ..._base.checks import check_integer
from ..._base.warnings import warn
from ...comm import Group
from .._passages import passages_loss, refuse

__all__ = ["ContrastiveLossWithQueryClosure", "DistributedContrastiveLoss", "SimpleContrastiveLoss"]


class SimpleContrastiveLoss:
    """Their `SimpleContrastiveLoss`: the loss of these rows, on this process alone.

    Args:
        n_hard_negatives: n.

    Raises:
        ValueError: if n is no integer, at least 0.
    """

    _reductions: tuple[str, ...] = ("mean", "sum", "none")
    _hint = ""

    def __init__(self, n_hard_negatives: int = 0) -> None:
        check_integer("n_hard_negatives", n_hard_negatives, minimum=0, maximum=2**31)
        self.target_per_qry = n_hard_negatives + 1

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return L.

        Args:
            x: (b, d).
            y: ((n + 1) b, d), or any number of rows beside a target.
            target: the row of y that belongs to each row of x, or whatever else
                `torch.nn.functional.cross_entropy` takes. Default: (n + 1) i.
            reduction: "mean", "sum" or "none".

        Raises:
            ValueError: if y has another number of rows, without a target, or for another reduction.
        """
        return self._loss(x, y, target, reduction, wb.comm.LocalCommunicator())

    def _loss(self, x: Tensor, y: Tensor, target: Tensor | None, reduction: Any, group: Group) -> Tensor:
        """Return L of the rows of a group."""
        caller, choices = type(self).__name__, ", ".join(map(repr, self._reductions))
        if reduction not in self._reductions:
            refuse(f"reduction must be one of {choices}, got {reduction!r}{self._hint}", caller, group)
        if target is None:
            return passages_loss(x, y, self.target_per_qry, caller=caller, reduction=reduction, group=group)

        def of_all(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(x @ y.T, target, reduction=reduction)

        return (
            of_all(x, y) if isinstance(group, wb.comm.LocalCommunicator) else wb.WholeBatch(of_all, group=group)(x, y)
        )


class DistributedContrastiveLoss(SimpleContrastiveLoss):
    """Their `DistributedContrastiveLoss`: the loss of the whole batch, with its exact gradient.

    After an engine has averaged the gradients, every parameter has the gradient of one process with all rows. Theirs
    gives 1/W of it on W processes, so leave out a factor W that makes up for that. A first backward pass in which W
    comes in as the gradient of the loss warns.

    Args:
        n_hard_negatives: n.
        group: ranks that share the batch, as in :func:`wholebatch.functional.info_nce_loss`.

    Raises:
        ValueError: if n is no integer, at least 0.
    """

    _reductions = ("mean", "sum")
    _hint = "; each rank has the losses of its rows only: use info_nce_loss"

    def __init__(self, n_hard_negatives: int = 0, *, group: Group = None) -> None:
        super().__init__(n_hard_negatives)
        self.group, self._checked = group, False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.gather_tensor is not DistributedContrastiveLoss.gather_tensor:
            raise TypeError(
                f"{cls.__name__} overrides gather_tensor, which wholebatch's loss does not call: no rows are gathered; "
                "pass group= for other ranks"
            )

    def __call__(self, x: Tensor, y: Tensor, target: Tensor | None = None, reduction: str = "mean") -> Tensor:
        """Return L of the rows of all ranks, the same on every rank.

        Args:
            x: (b, d), this rank's queries; b may differ between ranks and may be 0.
            y: ((n + 1) b, d), or any number of rows beside a target.
            target: as in :class:`SimpleContrastiveLoss`, for the rows of all ranks, and the same on all ranks: rank 0's
                rows come first. With a target every rank computes the similarities of all rows.
            reduction: "mean" or "sum", over all rows.

        Raises:
            ValueError: on every rank, if y has another number of rows, without a target, or for another reduction.
        """
        loss = self._loss(x, y, target, reduction, self.group)
        if loss.requires_grad and not self._checked:
            loss.register_hook(self._warn_of_a_factor)
        return loss

    @property
    def word_size(self) -> int:
        """The number of ranks, W."""
        return wb.comm.select_communicator(self.group).size

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return wb.comm.select_communicator(self.group).rank

    def gather_tensor(self, t: Tensor) -> Tensor:
        """Return the rows of all ranks, of which this rank's have a gradient; the loss does not need it."""
        return wb.gradcache.gather_input_tensor(lambda x: x, group=self.group)(t)

    def _warn_of_a_factor(self, grad: Tensor) -> None:
        if not self._checked and self.word_size > 1 and float(grad) == self.word_size:
            warn(
                f"the gradient that comes into DistributedContrastiveLoss is {self.word_size}, the number of "
                "processes. If the loss is multiplied by it, to make up for the average over processes: leave that "
                "factor out, the loss of wholebatch needs none"
            )
        self._checked = True


class ContrastiveLossWithQueryClosure(SimpleContrastiveLoss):
    """Their `ContrastiveLossWithQueryClosure`: the queries may come from a function.

    Args:
        n_hard_negatives: n.
    """

    def __call__(  # type: ignore[override]  # theirs
        self,
        *reps: Tensor,
        query_closure: Callable[[], Tensor] | None = None,
        target: Tensor | None = None,
        reduction: str = "mean",
    ) -> Tensor:
        """Return the loss of x and y, or of query_closure() and y.

        Raises:
            ValueError: for both x and a closure, for neither, and as in :class:`SimpleContrastiveLoss`.
        """
        if len(reps) not in (1, 2) or (len(reps) == 1) != callable(query_closure):
            closure = "a" if callable(query_closure) else "no"
            raise ValueError(f"pass x and y, or y and query_closure=; got {len(reps)} tensors and {closure} closure")
        x = reps[0] if query_closure is None else query_closure()
        return super().__call__(x, reps[-1], target, reduction)
