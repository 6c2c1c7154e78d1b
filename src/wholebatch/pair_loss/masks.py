"""Masks that the engine recognizes: pairs whose rows have the same integer of some name, or different ones.

    x.index != y.index                                    all but the row itself
    x.label == y.label                                    the same class
    (x.label == y.label) & (x.index != y.index)           the others of the same class

Sets of such pairs are described by O(B) integers, and kernels compute them from these. A mask is not recognized by its
name, nor by its values: its operations are watched. Comparisons of the same integers of both sides, and what `&` and
`~` make of these, are conditions; everything else is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from .affine import steers_or_writes
from .reductions import Term
from .row_data import INDEX, PARTNER
from .tile_entries import Entries

_EQUAL, _DIFFERENT = {"eq"}, {"ne", "not_equal"}
_AND, _NOT = {"and", "logical_and", "bitwise_and"}, {"invert", "logical_not", "bitwise_not"}


class Compared(NamedTuple):
    """Whether integers of a row and of a column, of the same name, are equal; or whether they differ."""

    name: str
    equal: bool

    @property
    def negated(self) -> Compared:
        """The opposite."""
        return Compared(self.name, not self.equal)


Condition = frozenset[Compared]  # all of these hold; empty: of every pair

EVERY: Condition = frozenset()
ITSELF, OTHER = (frozenset({Compared(INDEX, equal)}) for equal in (True, False))


def condition_of(term: Term, entries: Entries) -> Condition | None:
    """Return the condition that a term's mask is; None if it is another one.

    Args:
        term: the reduction.
        entries: a few of any values, with which the mask is called.
    """
    if term.where is None:
        return EVERY
    if term.mask_reads_similarity:
        return None
    sides = (entries.x, entries.y)
    with torch.no_grad(), _Watch(sides) as watch:
        mask = entries.mask(term)
    return None if watch.unsure or mask is None else watch.conditions.get(id(mask), (None, None))[1]


class _Watch(TorchFunctionMode):
    """Follow comparisons of numbers of both sides."""

    def __init__(self, sides: tuple[Any, Any]) -> None:
        super().__init__()
        self._leaves = {
            id(x): (letter, name)
            for letter, numbers in zip("xy", sides, strict=True)
            for name, x in numbers.items()
            if isinstance(x, Tensor) and name != PARTNER and not x.is_floating_point()
        }
        # conditions: each with its tensor, which lives as long as its id is compared
        self.conditions: dict[int, tuple[Tensor, Condition | None]] = {}
        self.unsure = False  # after a write, and where a tensor becomes a number that may steer the program

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.unsure |= steers_or_writes(func, kwargs)
        output = func(*args, **kwargs)
        if isinstance(output, Tensor) and not kwargs and len(tree_leaves(args)) == len(args):
            condition = self._condition(getattr(func, "__name__", "").strip("_"), args)
            if condition is not None:
                self.conditions[id(output)] = (output, condition)
        return output

    def _condition(self, operation: str, args: tuple[Any, ...]) -> Condition | None:
        """Return the condition that an operation returns; None for another one."""
        if operation in _EQUAL | _DIFFERENT and len(args) == 2:
            (letter, name), (other, other_name) = (self._leaves.get(id(x), ("", "")) for x in args)
            if {letter, other} == {"x", "y"} and name == other_name:
                return frozenset({Compared(name, operation in _EQUAL)})
        known = [self.conditions.get(id(x), (None, None))[1] for x in args]
        if operation in _AND and len(known) == 2 and known[0] is not None and known[1] is not None:
            both = known[0] | known[1]
            return None if any(compared.negated in both for compared in both) else both
        if operation in _NOT and len(known) == 1 and known[0] is not None and len(known[0]) == 1:
            return frozenset(compared.negated for compared in known[0])
        return None
