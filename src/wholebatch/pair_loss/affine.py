"""Scores that are affine in the similarity: f = a (s + c), where a and c depend on the row or the column alone.

    p.scale * s    p.scale * (s - x.partner)    (s - y.bias) / x.temperature

Most scores are. Autograd takes a dozen passes over a tile, each into fresh memory. Here a tile takes two, in place:

    f = (s + c) a        dL/ds = G a        dL/da = sum G f / a        dL/dc = a sum G          G = dL/df

and autograd sees only a and c, which are vectors. c is subtracted before the product: s - x.partner loses no digits.

Whether a score is affine is not guessed from its values. Each operation that it calls is watched: sums, differences,
products and quotients of what depends on s with what does not are affine, everything else is not. a and c follow from
the score at s = 0 and s = 1, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .reductions import Mean, Term
from .similarity import DISTANCE, ONE
from .tile_entries import Entries

_FAR = 8.0


class Coefficients(NamedTuple):
    """a and c of f = a (s + c), (1, 1), (m, 1) or (1, n) each, with the graph of data and parameters; no c: f = a s."""

    a: Tensor
    c: Tensor | None

    @torch.no_grad()
    def score_(self, s: Tensor, out: Tensor) -> Tensor:
        """Write f of a tile to `out`, without a gradient."""
        a = self.a.detach().to(s.dtype)
        if self.c is None:
            return torch.mul(s, a, out=out)
        return torch.add(s, self.c.detach().to(s.dtype), out=out).mul_(a)

    @torch.no_grad()
    def outputs(self, s: Tensor, score: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return a and c, if they have a gradient, each with dL by it, from s, dL/df and f, which is overwritten."""
        pairs = []
        if self.a.requires_grad and self.c is None:
            share = _sum_to(s if self.a.numel() == 1 else score.copy_(s), self.a, weights)
            pairs.append((self.a, share.clone()))  # of a tile of one row it may be the memory of the score
        elif self.a.requires_grad:
            pairs.append((self.a, _sum_to(score, self.a, weights) / self.a.detach()))
        if self.c is not None and self.c.requires_grad:
            pairs.append((self.c, _scaled_sum(weights, self.a.detach(), self.c)))
        return pairs


def _sum_to(x: Tensor, like: Tensor, weights: Tensor) -> Tensor:
    """Return sum G x in the shape of a; x may lose its values."""
    if like.numel() == 1:
        return torch.dot(weights.reshape(-1), x.reshape(-1)).to(like.dtype).view(1, 1)
    return x.mul_(weights).sum_to_size(like.shape).to(like.dtype)


def _scaled_sum(weights: Tensor, a: Tensor, c: Tensor) -> Tensor:
    """Return sum a G in the shape of c."""
    if a.shape[0] in (1, c.shape[0]) and a.shape[1] in (1, c.shape[1]):
        return a * weights.sum_to_size(c.shape).to(c.dtype)
    return (a.to(weights.dtype) * weights).sum_to_size(c.shape).to(c.dtype)


def may_be_affine(term: Term, kinds: Mapping[str, str]) -> bool:
    """Return whether a term's score can be computed in this way if it is affine."""
    plain = term.scored and term.ties == "first" and not (isinstance(term, Mean) and term.log_weight is not None)
    return plain and ONE in kinds and kinds[ONE] != DISTANCE


def is_affine(term: Term, entries: Entries, beside: str = "") -> bool:
    """Return whether the operations of a score, called with a few entries, leave no doubt that it is affine.

    Args:
        term: the reduction.
        entries: a few of them.
        beside: a name of rows and columns; the score has to be affine in s and in these numbers together.
    """
    s = entries.s[ONE].detach().clone()
    with torch.enable_grad(), _Watch(s, *(side[beside] for side in (entries.x, entries.y) if beside in side)) as watch:
        score = replace(entries, s={ONE: s}).values(term, None).value
    # another dtype: that of data of a wider type
    return score is not None and score.dtype == s.dtype and watch.is_affine(score)


def is_linear(term: Term, entries: Entries) -> bool:
    """Return whether no sum or difference enters a score that is affine: it is 0 where s is 0."""
    s = entries.s[ONE].detach().clone()
    with _Watch(s) as watch:
        replace(entries, s={ONE: s}).values(term, None)
    return not watch.adds


def losses_and_certainty(compute: Callable[[], Any], terms: Sequence[Tensor]) -> tuple[Any, bool]:
    """Return what a row loss returns, and whether its operations leave no doubt that it is affine in these terms.

    Its weights, if it returns some, do not depend on the terms then.
    """
    with _Watch(*terms) as watch:
        result = compute()
    losses, *weights = result if isinstance(result, tuple) and result else (result,)
    return result, watch.is_affine(losses) and not any(id(x) in {*watch.affine, *watch.other} for x in weights)


@torch.no_grad()
def confirmed(term: Term, entries: Entries) -> bool:
    """Return whether a (s + c) is the score of a few entries."""
    fitted = coefficients(term, entries)
    value = entries.values(term, None).value
    if fitted is None or value is None:
        return fitted is None  # another tile may have coefficients
    expected = fitted.score_(entries.s[ONE], torch.empty_like(entries.s[ONE]))
    return torch.allclose(value.expand(entries.shape), expected, 1e-3, 1e-3 * max(1.0, float(expected.abs().amax())))


def coefficients(term: Term, entries: Entries) -> Coefficients | None:
    """Return a and c from numbers of a tile's rows and columns; None if a is 0, one is a matrix or infinite, or c far.

    Args:
        term: whose score is affine.
        entries: of the tile, whose similarities c is compared with.
    """
    s = entries.s[ONE]
    values = [
        replace(entries, s={ONE: torch.full((1, 1), number, dtype=torch.float64, device=s.device)})
        .values(term, None)
        .value
        for number in (0.0, 1.0)
    ]
    assert values[0] is not None
    assert values[1] is not None
    a, b = values[1] - values[0], values[0]
    if any(1 not in x.shape for x in (a, b, b / a)):
        return None
    c = b / a
    with torch.no_grad():
        fits = torch.isfinite(c).all() & torch.isfinite(a).all()
        if a.requires_grad or c.requires_grad:
            # Where c is much larger than s, the sums of G f and of G c are too near to each other.
            fits &= c.abs().amax() <= _FAR * s.detach().abs().amax()
    return Coefficients(a, c) if bool(fits) else None


def by_factor(term: Term, entries: Entries) -> Coefficients:
    """Return the coefficients of a score whose factor is given."""
    assert term.factor is not None
    factor: Any = entries.call(term.factor)
    s = entries.s[ONE]
    if not isinstance(factor, Tensor):  # of a parameter that is a number
        factor = torch.full((), factor, dtype=s.dtype, device=s.device)
    return Coefficients(factor.view((1,) * (2 - factor.dim()) + tuple(factor.shape)), None)


def are_constant(fitted: Coefficients, entries: Entries) -> bool:
    """Return whether a and c are the same in all tiles, and have no gradient."""
    only_numbers = not any(isinstance(x, Tensor) for x in entries.p.values())
    return only_numbers and min(entries.shape) > 1 and all(x is None or x.numel() == 1 for x in fitted)


_SUMS = {torch.add, torch.sub, torch.subtract, torch.rsub, Tensor.add, Tensor.sub, Tensor.subtract}
_SUMS |= {Tensor.__add__, Tensor.__radd__, Tensor.__sub__, Tensor.__rsub__}
_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__}
_QUOTIENTS = {torch.div, torch.divide, torch.true_divide, Tensor.div, Tensor.divide, Tensor.__truediv__}
_SIGNS = {torch.neg, torch.negative, Tensor.neg, Tensor.__neg__}
_IN_PLACE = ("__i", "__setitem__", "__set__", "__delitem__")
_TO_PYTHON = {"__bool__", "__float__", "__int__", "__complex__", "__contains__", "__array__", "item", "tolist", "numpy"}
_TO_PYTHON |= {"is_nonzero", "equal", "allclose", "__len__"}


def steers_or_writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation writes into a tensor, or makes a number of it that may steer the program."""
    name = getattr(func, "__name__", "")
    writes = (name.startswith(_IN_PLACE) and name != "__invert__") or (name.endswith("_") and name[-2:] != "__")
    return name in _TO_PYTHON or writes or "out" in kwargs or bool(kwargs.get("inplace"))


class _Watch(TorchFunctionMode):
    """Follow what depends on some tensors, and whether it is affine in them."""

    def __init__(self, *variables: Tensor) -> None:
        super().__init__()
        self.affine = {id(x): x for x in variables}  # they live as long as their ids are compared
        self.other: dict[int, Tensor] = {}
        # unsure: after a write, where a tensor becomes a number that may steer the program, and under torch.no_grad
        self.unsure, self._has_grad = False, torch.is_grad_enabled()
        self.adds = False  # whether a sum or a difference was among the operations

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.unsure |= steers_or_writes(func, kwargs) or torch.is_grad_enabled() != self._has_grad
        output = func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        affine, other = (any(id(x) in known for x in inputs) for known in (self.affine, self.other))
        if affine or other:
            into = self.affine if affine and not other and self._stays(func, args, kwargs) else self.other
            for x in tree_leaves(output):
                if isinstance(x, Tensor):
                    into[id(x)] = x
        return output

    def is_affine(self, x: Any) -> bool:
        """Return whether a result is certainly affine in the tensors."""
        written = any(y._version for y in self.affine.values() if y is not x and not y.is_inference())
        return id(x) in self.affine and id(x) not in self.other and not self.unsure and not written

    def _stays(self, func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return whether a function of affine arguments is affine."""
        if kwargs or len(args) > 2:
            return False
        depends = [isinstance(x, Tensor) and id(x) in self.affine for x in args]
        self.adds |= func in _SUMS
        if func in _SUMS or func in _SIGNS:
            return True
        if func in _PRODUCTS:
            return depends.count(True) == 1
        return func in _QUOTIENTS and depends[0] and not any(depends[1:])
