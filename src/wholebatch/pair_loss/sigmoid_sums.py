"""Sums that the sigmoid sweep computes: of softplus, over candidates, of a score that is affine in one similarity.

    R_i = sum_j log(1 + exp(f_ij)),    f = a s + b,    a and b of parameters alone

SigLIP is such a loss: softplus(f) of all pairs, minus f of a row and its partner. Where the row loss adds its terms up,
the gradient by each sum is known before the sum is, and so that of each entry. Then one pass over S computes sums and
gradients: 3 units of multiply-adds in all, as for the built-in SigLIP loss, instead of 4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus
from torch.overrides import TorchFunctionMode

from .._base.precision import wide_dtype
from ..contract import Facts
from ..nodes import Layout, choose_route
from ..nodes.sigmoid import Sigmoid, SigmoidPlan
from ..nodes.sigmoid_in_kernels import choose_kernels
from ..sweep import Pairs
from .affine import losses_and_certainty
from .declaration import Declaration
from .reductions import Count, Mean, Sum, Term
from .row_data import Fields
from .tile import Reduced
from .tile_entries import Entries

_EXACT, _EXACT_IN_FLOAT32 = 36.0, 17.0  # from here on, softplus(x) rounds to x


class Argument:
    """The score whose softplus a score is.

    Args:
        score: f(s, x, y, p).
        double: whether similarities are in float64, where a threshold of softplus would show.
    """

    def __init__(self, score: Callable[..., Tensor], *, double: bool) -> None:
        self._score, self._threshold = score, _EXACT if double else _EXACT_IN_FLOAT32

    def __call__(self, *arguments: Any) -> Tensor:
        with _Softplus(self._threshold) as watch:
            value = self._score(*arguments)
        if id(value) not in watch.arguments:
            raise ValueError("score must return a softplus in every call, as it did before")
        return watch.arguments[id(value)][1]


class _Softplus(TorchFunctionMode):
    """Record the argument of each softplus; -logsigmoid(-f) is one as well."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self._threshold = threshold
        self.arguments: dict[int, tuple[Tensor, Tensor]] = {}  # results, which live as long as their ids, and arguments
        self._log_sigmoids: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func is softplus and self._is_softplus(*args, **(kwargs or {})):
            self.arguments[id(output)] = output, args[0]
        elif func is logsigmoid and len(args) == 1:
            self._log_sigmoids[id(output)] = output, args[0]
        elif func in (torch.neg, torch.negative, Tensor.neg, Tensor.__neg__) and id(args[0]) in self._log_sigmoids:
            self.arguments[id(output)] = output, -self._log_sigmoids[id(args[0])][1]
        return output

    def _is_softplus(self, argument: Tensor, beta: float = 1.0, threshold: float = 20.0) -> bool:
        return beta == 1 and threshold >= self._threshold


def inside_softplus(terms: Sequence[Reduced], entries: Entries, *, double: bool) -> Reduced | None:
    """Return the only term with a score, with the score inside softplus instead; None if there is no such term.

    Args:
        terms: that are reduced.
        entries: a few of them.
        double: as in `Argument`.
    """
    scored = [each for each in terms if each.term.scored]
    if len(scored) != 1 or type(scored[0].term) not in (Sum, Mean) or scored[0].term.score is None:
        return None
    term = scored[0].term
    assert term.score is not None
    inside = type(term)(Argument(term.score, double=double), term.where, over=term.over)
    if getattr(term, "log_weight", None) is not None:
        return None
    try:
        inside_value = entries.values(inside, None).value
    except Exception:  # no softplus; or fixed numbers are no indices of a table: tiles compute such terms
        return None
    return None if inside_value is None else replace(scored[0], term=inside)


def is_known(term: Term) -> bool:
    """Return whether a term is a constant for the row loss, which is known before the sweep."""
    return isinstance(term, Count) and term.over == "batch"


def adds_up(declared: Declaration, entries: Entries) -> bool:
    """Return whether the row loss is affine in all terms but counts over the batch, and the only loss."""
    if declared.row_loss is None or declared.column_loss is not None:
        return False
    even = torch.linspace(0.5, 1.5, len(next(iter(entries.x.values()))), dtype=torch.float64, device="cpu")
    r = {name: even.roll(number) for number, name in enumerate(declared.terms)}
    x = {name: number.squeeze(1) for name, number in entries.x.items()}
    summed = [value for name, value in r.items() if not is_known(declared.terms[name])]
    row_loss = declared.row_loss
    try:
        with torch.enable_grad():
            return losses_and_certainty(
                lambda: row_loss(Fields("r", r), Fields("x", x), Fields("p", entries.p)), summed
            )[1]
    except Exception:  # of the fixed numbers
        return False


def sigmoid_sums(
    facts: Facts,
    layout: Layout,
    pairs: Pairs,
    scale: tuple[float, Any],
    bias: tuple[float, Any],
    features: tuple[Tensor, Tensor],
    slopes: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor | None]:
    """Return R of this rank's rows, (b,); with slopes as constants, beside them 0 with the gradient of L by them.

    Collective: as :func:`wholebatch.functional.siglip_loss`, without the sum over ranks.

    Args:
        facts: of the call, with the dtype of these features.
        layout: of rows and columns.
        pairs: the excluded ones.
        scale: a as a number, and with its graph.
        bias: b, likewise.
        features: of rows and columns.
        slopes: from R, a leaf, to dL/dR, (b,), which does not depend on R; None: it is not known before R is.
    """
    plan = SigmoidPlan(
        choose_route(facts, layout, keep=False), pairs, scale[0], bias[0], facts.differentiable,
        per_row=slopes is None, in_kernels=facts.kernels,
    )  # fmt: skip
    plan = choose_kernels(facts, plan, layout, bias[1], weighted=slopes is not None)
    by_row = None
    if slopes is not None:
        by_row = slopes(features[0].new_zeros(len(features[0]), dtype=wide_dtype(facts.device)).requires_grad_())
    output, sums = Sigmoid.apply(plan, scale[1], bias[1], by_row, *features)
    return (output, None) if slopes is None else (sums, _GradientOf.apply(output))


class _GradientOf(torch.autograd.Function):
    """0 with the gradient of a number."""

    @staticmethod
    def forward(ctx: Any, number: Tensor) -> Tensor:
        return torch.zeros_like(number)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
