"""The terms of a declared loss: what is reduced, and over which candidates.

A score f(s, x, y, p) returns a number for each pair, and a mask where(x, y), (x, y, s) or (x, y, s, p) says which pairs
are candidates. In a tile, `s` is (m, n), the data of rows `x` are (m, 1), those of columns `y` are (1, n), and `p`
holds the parameters. Both are called with other shapes as well, so they must treat every pair alike, by itself.

Source: losses of this form with a row-wise maximum or sum are listed in Musgrave et al., 2020, arXiv:2003.08505.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar

from torch import Tensor, nn

from .._base.checks import check_callable, check_choice, check_number

Score = Callable[..., Tensor]
Mask = Callable[..., Tensor]
OVER = ("batch", "own", "both")
TIES = ("first", "split")


class Term:
    """A reduction over the candidates of each row: the base of all terms.

    Args:
        score: f(s, x, y, p); None: the similarity itself.
        where: (x, y), (x, y, s) or (x, y, s, p), returns True for candidates; None: all pairs are.
        over: "batch": the candidates are the rows of y on all ranks; "own": the further candidates that each row
            brings, `candidates=`; "both": all of these.
    """

    scored: ClassVar[bool] = True
    slope: Score | None = None
    factor: Score | None = None  # of terms of this library: f = factor(s, x, y, p) s, where the factor reads no s
    bound: float | None = None
    ties: str = "first"

    def __init__(self, score: Score | None = None, where: Mask | None = None, *, over: str = "batch") -> None:
        if score is not None:
            check_callable("score", score)
        if where is not None:
            check_callable("where", where)
        check_choice("over", over, OVER)
        self.score, self.where, self.over = score, where, over
        self.shared: dict[str, tuple[bool, ...]] = {}  # see `Entries`

    @cached_property
    def mask_reads_similarity(self) -> bool:
        """Whether the mask has the similarity as a third argument."""
        return self.where is not None and takes(self.where, 3)

    @cached_property
    def mask_reads_parameters(self) -> bool:
        """Whether the mask has the parameters as a fourth argument."""
        return self.where is not None and takes(self.where, 4)

    @cached_property
    def functions(self) -> dict[str, Callable[..., Tensor]]:
        """The user's functions, by the names of the arguments."""
        functions = {
            "score": self.score,
            "where": self.where,
            "log_weight": getattr(self, "log_weight", None),
            "slope": self.slope,
        }
        return {name: function for name, function in functions.items() if function is not None}

    @property
    def settings(self) -> list[str | float | None]:
        """The settings that are no functions; ranks must have the same."""
        return [self.over, self.bound, self.ties]

    def __repr__(self) -> str:
        names = [f"{name}={getattr(function, '__name__', function)}" for name, function in self.functions.items()]
        over = [] if self.over == "batch" else [f"over={self.over!r}"]
        return f"{type(self).__name__}({', '.join([*names, *over])})"


class _Sloped(Term):
    """A term whose score may have a given derivative."""

    def __init__(
        self,
        score: Score | None = None,
        where: Mask | None = None,
        *,
        over: str = "batch",
        slope: Score | None = None,
    ) -> None:
        super().__init__(score, where, over=over)
        if slope is not None:
            check_callable("slope", slope)
            if score is None:
                raise ValueError("slope must be left out without a score: the similarity has slope 1")
        self.slope = slope


class LogSumExp(_Sloped):
    r"""R_i = log sum_j exp f_ij over the candidates of row i; -inf, with gradient 0, where there are none.

    A score of -inf is no candidate. Sums are relative to the largest score of the row: nothing overflows.

    Args:
        score, where, over: as for every term, see :class:`wholebatch.PairLoss`.
        slope: (s, x, y, p) -> df / ds, instead of autograd; used where neither data nor parameters have a gradient.
        bound: a number that no score exceeds by much: sums are relative to it, which saves a pass over each tile. In
            float32, scores that are 87 below it vanish, and those that are 88 above it overflow.

    >>> import torch, wholebatch as wb
    >>> loss_fn = wb.PairLoss({"all": wb.terms.LogSumExp()}, lambda r, x, p: r.all)
    >>> loss_fn(torch.zeros(2, 3))
    tensor(0.6931)
    """

    def __init__(
        self,
        score: Score | None = None,
        where: Mask | None = None,
        *,
        over: str = "batch",
        slope: Score | None = None,
        bound: float | None = None,
    ) -> None:
        super().__init__(score, where, over=over, slope=slope)
        self.bound = None if bound is None else check_number("bound", bound)


class Sum(_Sloped):
    """R_i = sum_j f_ij over the candidates of row i; 0 where there are none.

    Args:
        score, where, over: as for every term, see :class:`wholebatch.PairLoss`.
        slope: as for :class:`wholebatch.terms.LogSumExp`.
    """


class Mean(_Sloped):
    r"""R_i = sum_j f_ij / n_i over the n_i candidates of row i, or a mean weighted by exp(log_weight).

    With `log_weight` l: R_i = sum_j exp(l_ij) f_ij / sum_j exp(l_ij), a mean under a softmax. 0 without candidates.

    Args:
        score, where, over: as for every term, see :class:`wholebatch.PairLoss`.
        log_weight: l(s, x, y, p), a function like a score.
        slope: as for :class:`wholebatch.terms.LogSumExp`; not beside log_weight.
    """

    def __init__(
        self,
        score: Score | None = None,
        where: Mask | None = None,
        *,
        log_weight: Score | None = None,
        over: str = "batch",
        slope: Score | None = None,
    ) -> None:
        super().__init__(score, where, over=over, slope=slope)
        if log_weight is not None:
            check_callable("log_weight", log_weight)
            if slope is not None:
                raise ValueError("slope must be left out beside log_weight: autograd takes both derivatives")
        self.log_weight = log_weight


class Count(Term):
    """R_i = the number of candidates of row i, without a gradient.

    Args:
        where, over: as for every term, see :class:`wholebatch.PairLoss`.
    """

    scored = False

    def __init__(self, where: Mask | None = None, *, over: str = "batch") -> None:
        super().__init__(None, where, over=over)


class _Extreme(Term):
    """A maximum or a minimum."""

    def __init__(
        self,
        score: Score | None = None,
        where: Mask | None = None,
        *,
        over: str = "batch",
        ties: str = "first",
    ) -> None:
        super().__init__(score, where, over=over)
        self.ties = check_choice("ties", ties, TIES)
        if ties == "split" and over == "both":
            raise ValueError("ties must be 'first' with over='both'; declare one term over the batch and one over own")


class Max(_Extreme):
    """R_i = max_j f_ij over the candidates of row i; -inf, with gradient 0, where there are none.

    The gradient belongs to the pair that wins, the one with the lowest index where several are equal. Its score is
    computed again from its two rows. A score of -inf is no candidate.

    Args:
        score, where, over: as for every term, see :class:`wholebatch.PairLoss`.
        ties: "first", or "split": equal scores share the gradient evenly, as in torch.amax. Then the value is that of
            the tile's product, and whether two scores are equal is decided after its rounding.
    """


class Min(_Extreme):
    """R_i = min_j f_ij over the candidates of row i; inf, with gradient 0, where there are none.

    Otherwise as :class:`wholebatch.terms.Max`; a score of inf is no candidate.

    Args:
        score, where, over: as for every term, see :class:`wholebatch.PairLoss`.
        ties: as for :class:`wholebatch.terms.Max`.
    """


class Partner(Term):
    """R_i = f of row i and its partner: the row of y with the same index, or with the same integer `pair`.

    It is computed from the two rows in the precision of sums, whatever the precision of tiles; or with the sweep of a
    LogSumExp that has the same score, in its precision.

    Args:
        score: f(s, x, y, p); None: the similarity itself.
    """

    def __init__(self, score: Score | None = None) -> None:
        super().__init__(score)


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function requires this number of positional arguments, or more."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return len([p for p in parameters.values() if p.kind in kinds and p.default is p.empty]) >= count
