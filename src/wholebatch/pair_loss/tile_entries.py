"""Masks and scores of some entries of the matrix of pairs: those of a tile, or a list of single pairs.

A list of k pairs looks to the user's functions like a tile of k rows and one column.

An entry that is no candidate reaches the score as a safe value, so that no NaN or infinity of it enters a gradient. The
values of a masked entry are replaced before the score is computed, in all that the score reads: similarities and data.
Where no gradient is taken, or where it is looked at afterwards, `values` may leave this out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .reductions import Term
from .row_data import PARTNER, ROUNDING, Fields, changed
from .similarity import ONE, safe_value

_SAFE_DATA = 0.5

Numbers = Mapping[str, Any]  # tensors by name; of several similarities: again by name


@dataclass(frozen=True)
class Values:
    """The numbers of one term at some entries.

    Args:
        shape: of the entries.
        mask: the candidates, broadcast to the shape; None: all entries.
        value: the scores; None: the term has none.
        log_weight: of a weighted mean.
        room: memory of this shape, which rules may overwrite; None: they take fresh memory.
        fused: whether a compiler will make one loop of all operations.
    """

    shape: tuple[int, ...]
    mask: Tensor | None
    value: Tensor | None = None
    log_weight: Tensor | None = None
    room: Tensor | None = None
    fused: bool = False

    def filled(self, x: Tensor, value: float) -> Tensor:
        """Return scores or weights of candidates, and 0 or -inf elsewhere, in the whole shape; without a gradient.

        On a CPU `torch.where` takes up to thirty times as long as arithmetic, because it branches at each entry. So
        finite numbers are multiplied by 0 and 1, or compared with -inf and inf.
        """
        x = x.detach().expand(self.shape)
        if self.mask is None:
            return x
        if self.fused or x.device.type != "cpu" or x.dtype == torch.bool or not bool(x.sum().isfinite()):
            return torch.where(self.mask, x, value)
        ones = self.ones.to(x.dtype)
        return x * ones if value == 0 else torch.minimum(x, (ones - 0.5) * math.inf)

    def exponentials(self, x: Tensor, shift: Tensor | float) -> Tensor:
        """Return exp(x - shift) of candidates and 0 elsewhere, without a gradient, in `room` if there is one."""
        scores = self.filled(x, float("-inf"))
        room = self.room if self.room is not None and self.room.dtype == scores.dtype else None
        return torch.sub(scores, shift.to(scores.dtype) if isinstance(shift, Tensor) else shift, out=room).exp_()

    @property
    def ones(self) -> Tensor:
        """1 for candidates and 0 elsewhere, in float32; there must be a mask."""
        assert self.mask is not None
        mask = self.mask if self.fused else self.mask.view(torch.uint8)
        return mask.to(torch.float32).expand(self.shape)

    @property
    def differentiable(self) -> list[Tensor]:
        """Scores and weights that have a gradient."""
        return [x for x in (self.value, self.log_weight) if x is not None and x.requires_grad]


def with_ties(s: Mapping[str, Tensor], *sides: Numbers) -> dict[str, Tensor]:
    """Return similarities; one that differs from that of a partner by rounding alone equals it. Gradients stay."""
    similarities = dict(s)
    for side in (numbers for numbers in sides if ROUNDING in numbers):
        for name, x in similarities.items():
            partner, bound = (side[key] if name == ONE else side[key][name] for key in (PARTNER, ROUNDING))
            tied = torch.where((x.detach() - partner).abs() <= bound, partner, x).detach()
            similarities[name] = tied + (x - x.detach()) if x.requires_grad else tied
    return similarities


@dataclass(frozen=True)
class Entries:
    """Some entries, and what the user's functions may read of them.

    Args:
        kinds: of similarities, by name.
        s: similarities by name, (m, n) each.
        x: numbers of rows, (m, 1) each.
        y: numbers of columns, (1, n) each; of a list of pairs (m, 1).
        p: parameters.
        reads: sets that get the names that are read of "x", "y" and "p"; None: they are not recorded.
    """

    kinds: Mapping[str, str]
    s: Mapping[str, Tensor]
    x: Numbers
    y: Numbers
    p: Numbers
    reads: Mapping[str, set[str]] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns."""
        return tuple(next(iter(self.s.values())).shape)

    def first(self, most: int = 16) -> Entries:
        """Return the first few rows and columns alone."""
        s, x, y = (changed(numbers, lambda numbers: numbers[:most, :most]) for numbers in (self.s, self.x, self.y))
        return replace(self, s=s, x=x, y=y)

    def mask(self, term: Term) -> Tensor | None:
        """Return the candidates of a term, without a gradient; None: all entries."""
        if term.where is None:
            return None
        x, y, p = self._arguments(None)
        with torch.no_grad():
            arguments = (x, y, self._similarity(None, detached=True), p)
            count = 2 + term.mask_reads_similarity + term.mask_reads_parameters
            return self._checked(term, "where", term.where(*arguments[:count]))

    def values(self, term: Term, mask: Tensor | None, *, safe: bool = True) -> Values:
        """Return the scores of a term at all entries; those of other entries than candidates mean nothing.

        Args:
            term: the reduction.
            mask: its candidates.
            safe: whether other entries reach the score as safe values.
        """
        if not term.scored:
            return Values(self.shape, mask)
        replaced = mask if safe else None
        s, (x, y, p) = self._similarity(replaced), self._arguments(replaced)

        def call(name: str) -> Tensor | None:
            function: Callable[..., Tensor] | None = getattr(term, name, None)
            return None if function is None else self._checked(term, name, function(s, x, y, p))

        return Values(self.shape, mask, call("score") if term.score is not None else s, call("log_weight"))

    def call(self, function: Callable[..., Tensor]) -> Tensor:
        """Return what a function like a score returns at all entries."""
        return function(self._similarity(None), *self._arguments(None))

    def _checked(self, term: Term, name: str, x: Tensor) -> Tensor:
        """Return what a function has returned, unless all rows or columns share a number here, and not at first use."""
        shape = (1,) * (2 - x.dim()) + tuple(x.shape) if isinstance(x, Tensor) else ()
        shared = tuple(bool(size == 1 != whole) for size, whole in zip(shape, self.shape, strict=False))
        if self.reads is not None:  # at the first use
            term.shared[name] = tuple(map(max, shared, term.shared.get(name, shared)))
        elif any(now > then for now, then in zip(shared, term.shared.get(name, shared), strict=False)):
            raise ValueError(
                f"{name} of {term!r} must return one value for each entry of every tile, {self.shape} here, got "
                f"{tuple(x.shape)}; it must not depend on the shape of its arguments"
            )
        return x

    def _similarity(self, mask: Tensor | None, *, detached: bool = False) -> Any:
        similarities = {}
        for name, s in self.s.items():
            s = s.detach() if detached else s
            similarities[name] = s if mask is None else torch.where(mask, s, safe_value(self.kinds[name]))
        return similarities[ONE] if ONE in similarities else Fields("s", similarities)

    def _arguments(self, mask: Tensor | None) -> tuple[Fields, Fields, Fields]:
        arguments = []
        for letter, numbers in (("x", self.x), ("y", self.y)):
            read = None if self.reads is None else self.reads[letter]
            arguments.append(
                Fields(letter, numbers, read) if mask is None else _SafeFields(letter, numbers, read, mask, self.kinds)
            )
        return arguments[0], arguments[1], Fields("p", self.p, None if self.reads is None else self.reads["p"])


class _SafeFields(Fields):
    """Numbers of rows or columns, with safe values where an entry is no candidate."""

    __slots__ = ("_kinds", "_mask")

    def __init__(
        self,
        letter: str,
        values: Numbers,
        read: set[str] | None,
        mask: Tensor,
        kinds: Mapping[str, str],
    ) -> None:
        super().__init__(letter, values, read)
        object.__setattr__(self, "_mask", mask)
        object.__setattr__(self, "_kinds", kinds)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, Fields):  # of several similarities
            return Fields("s", {key: self._replaced(value[key], safe_value(self._kinds[key])) for key in value})
        if value.is_floating_point():
            return self._replaced(value, safe_value(self._kinds[ONE]) if name == PARTNER else _SAFE_DATA)
        return value if value.dtype == torch.bool else torch.where(self._mask, value, 1)

    def _replaced(self, x: Tensor, value: float) -> Tensor:
        return torch.where(self._mask, x, value)
