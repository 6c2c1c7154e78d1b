"""Tiles that are computed by compiled functions: masks, scores and reductions in a few passes, dL/ds in one or two.

    forward    products, data, parameters, kept numbers            -> kept numbers of rows and columns
    backward   products, data, parameters, the numbers of rules    -> gradients of all of these that are learned

Each direction is traced once, the user's functions and autograd's operations alike, with sizes as symbols, and compiled
for all tiles. Entries that are no candidates always reach scores as safe values: here they cost no pass over the tile.

The user's functions run only while they are traced. What they read in Python is part of the key under which a kernel is
kept, see `fingerprint`; and a few entries of each pass are computed by eager PyTorch as well. If these differ, or
anything fails, this rank warns once and continues with plain tiles. It need not tell others: tiles do not communicate.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..partition import Tile
from .tile import Leaves, Masks, PlainTiles, Reduced, Slot, collect, sides_of, update_

_FEW = (16, 15)  # entries that are computed in both ways
_MOST = 16  # kernels of a declaration
_NOWHERE = 2.0  # divides the largest number: a shift at which every weight is 0

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A compiled function of tensors, and the places of the gradients that it returns."""

    run: Function
    places: list[Slot]


@dataclass
class Kernels:
    """The kernels of a declared loss, by what they were traced with. Copies of the loss start without any."""

    found: dict[str, Kernel] = field(default_factory=dict)
    failed: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        return Kernels, ()

    def give_up(self, reason: str) -> None:
        """Use plain tiles from now on, and say why."""
        self.failed = True
        self.found.clear()
        warnings.warn(f"PairLoss computes its tiles without compiled functions from now on: {reason}", stacklevel=2)


class CompiledTiles:
    """Tiles that compiled functions compute, and plain ones where there are none.

    Args:
        plain: the same tiles without the compiler.
        kernels: where compiled functions are kept.
        signature: of the declaration.
        side: rows and columns of a tile.
    """

    def __init__(self, plain: PlainTiles, kernels: Kernels, signature: str, side: int) -> None:
        self.plain, self.kernels, self.signature, self.side = plain, kernels, signature, side
        self.reduced = plain.reduced
        self._checked = set[int]()
        self._numbers = dict[Slot, Tensor]()

    def update_(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Tensor | None],
        cols: Sequence[Tensor | None],
        firsts: tuple[int, int],
    ) -> None:
        """Add a tile to the kept numbers of its rows and columns, as `PlainTiles` does."""
        reduced = self.reduced
        into = [*rows, *cols]
        # On the diagonal of a symmetric matrix the sums of columns are computed as well, and dropped.
        wanted = [of.rows for of in reduced] + [of.cols for of in reduced]
        given = [
            (mine if mine is not None else other).contiguous() if want else None
            for want, mine, other in zip(wanted, into, [*rows, *rows], strict=True)
        ]
        kept = [x for x in given if x is not None]
        indices = [torch.tensor(first) for first in firsts] if any("index" in of.rule.kinds for of in reduced) else []
        indices = [first.to(kept[0].device) for first in indices]
        form = _Form(leaves)

        def function(*tensors: Tensor) -> list[Tensor]:
            numbers = iter(tensors[form.count : form.count + len(kept)])
            of_sides = [next(numbers).clone() if want else None for want in wanted]
            entries = form.leaves(tensors).entries()
            at: tuple[Any, ...] = tensors[form.count + len(kept) :] or (0, 0)
            for number, of in enumerate(reduced):
                values = replace(entries.values(of.term, entries.mask(of.term), safe=False), fused=True)
                update_(of, values, of_sides[number], of_sides[number + len(reduced)], (at[0], at[1]))
            return [x for x in of_sides if x is not None]

        spread = [*(["x"] * sum(wanted[: len(reduced)])), *(["y"] * sum(wanted[len(reduced) :]))]
        found = self._call("forward", tile, form, kept, spread, indices, function)
        if found is None:
            self.plain.update_(tile, leaves, masks, rows, cols, firsts)
            return
        numbers = iter(found[1])
        for x, want in zip(into, wanted, strict=True):
            if want:
                new = next(numbers)
                if x is not None:
                    x.copy_(new)

    def gradients(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Sequence[Tensor]],
        cols: Sequence[Sequence[Tensor]],
    ) -> dict[Slot, Tensor]:
        """Return the gradients of a tile's leaves, as `PlainTiles` does."""
        form = _Form(leaves)
        dtypes = self._dtypes_of_scores(leaves)
        given, spread = list[Tensor](), list[str]()
        for letter, sides in (("x", rows), ("y", cols)):
            for number, of in enumerate(self.reduced):
                numbers: Sequence[Tensor] = sides[number]
                if (of.rows if letter == "x" else of.cols) and of.rule.constants:
                    if not len(numbers):  # on the diagonal of a symmetric matrix
                        numbers = _nowhere(of, rows[number][0], dtypes[number])
                    given += [x.to(dtypes[number]) for x in numbers]
                    spread += [letter] * len(numbers)
        places = list[Slot]()

        def function(*tensors: Tensor) -> list[Tensor]:
            numbers = iter(tensors[form.count :])
            of_sides = [
                [
                    [next(numbers) for _ in range(of.rule.constants)]
                    if (of.rows if letter == "x" else of.cols)
                    else []
                    for of in self.reduced
                ]
                for letter in "xy"
            ]
            outputs = list[tuple[Tensor, Tensor]]()
            with torch.enable_grad():
                here = form.leaves(tensors)
                entries = here.entries()
                for number, of in enumerate(self.reduced):
                    if of.rule.constants:
                        values = replace(entries.values(of.term, entries.mask(of.term)), fused=True)
                        collect(of.rule, values, sides_of(*(side[number] for side in of_sides)), outputs)
                grads = here.gradients(*zip(*outputs, strict=True)) if outputs else {}
            places[:] = grads
            return [grad.detach() for grad in grads.values()]

        found = self._call("backward", tile, form, given, spread, [], function, places)
        if found is None:
            return self.plain.gradients(tile, leaves, masks, rows, cols)
        return dict(zip(*found, strict=True))

    def _dtypes_of_scores(self, leaves: Leaves) -> list[torch.dtype]:
        """Return the dtypes of all terms' scores."""
        if not hasattr(self, "_dtypes"):
            with torch.no_grad():
                entries = leaves.entries().first(2)
                found = [entries.values(of.term, None).value for of in self.reduced]
            self._dtypes = [torch.float32 if x is None else x.dtype for x in found]
        return self._dtypes

    def _call(
        self,
        direction: str,
        tile: Tile,
        form: _Form,
        given: list[Tensor],
        spread: list[str],
        scalars: list[Tensor],
        function: Function,
        places: list[Slot] | None = None,
    ) -> tuple[list[Slot], list[Tensor]] | None:
        """Return what the kernel of a function computes; None: the tile has to be computed without."""
        if self.kernels.failed or min(tile.shape) < 2:
            return None  # a compiler takes a size of 1 for a constant
        tensors = [*form.tensors(self._numbers), *given, *scalars]
        key = repr((direction, self.signature, self._describe(), form.described, [x.dtype for x in given]))
        try:
            kernel = self.kernels.found.get(key)
            if kernel is None:
                if len(self.kernels.found) >= _MOST:
                    raise ValueError(f"it has been called in {_MOST // 2} ways that need functions of their own")
                sizes = form.sizes(self.side)
                letters = [*form.letters, *spread, *([""] * len(scalars))]
                example = [_resized(x, letter, sizes) for x, letter in zip(tensors, letters, strict=True)]
                kernel = Kernel(compiled(function, example), list(places or ()))
                kernel.run(*example)
                self.kernels.found[key] = kernel
            if id(kernel) not in self._checked:
                self._checked.add(id(kernel))
                letters = [*form.letters, *spread, *([""] * len(scalars))]
                _check(kernel.run, function, [_cut(x, letter) for x, letter in zip(tensors, letters, strict=True)])
            return kernel.places, kernel.run(*tensors)
        except Exception as error:  # of the compiler; plain tiles raise again what is the user's
            self.kernels.give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return None

    def _describe(self) -> list[tuple[str, bool, bool]]:
        return [(of.name, of.rows, of.cols) for of in self.reduced]


class _Form:
    """How the tensors of a tile's leaves are passed one after the other, and made into leaves again."""

    def __init__(self, leaves: Leaves) -> None:
        self.given = leaves
        self.slots = [(at, x) for at, x in leaves.slots() if isinstance(x, Tensor | float)]
        self.learned = {at for at, x in self.slots if isinstance(x, Tensor) and x.requires_grad}
        self.letters = [letter for (letter, _), _ in self.slots]
        self.count = len(self.slots)
        self.dtype = next(iter(leaves.products.values())).dtype
        self.device = next(iter(leaves.products.values())).device

    @property
    def described(self) -> str:
        """Everything about the leaves that a kernel depends on, except for rows and columns."""
        tensors = [(at, x.dtype if isinstance(x, Tensor) else "float", at in self.learned) for at, x in self.slots]
        parameters = [
            (name, tuple(x.shape) if isinstance(x, Tensor) else "" if isinstance(x, float) else x)
            for name, x in self.given.parameters.items()
        ]
        return repr((tensors, parameters, self.dtype, self.device))

    def tensors(self, numbers: dict[Slot, Tensor]) -> list[Tensor]:
        """Return the tensors; numbers of rows and columns are vectors, and Python's numbers become tensors."""
        found = []
        for at, x in self.slots:
            if isinstance(x, Tensor):
                found.append(x.detach().reshape(-1) if at[0] in "xy" else x.detach())
            else:
                if at not in numbers:
                    numbers[at] = torch.tensor(x, dtype=self.dtype, device=self.device)
                found.append(numbers[at])
        return found

    def leaves(self, tensors: Sequence[Tensor]) -> Leaves:
        """Return leaves with these tensors."""
        values = {}
        for (at, _), x in zip(self.slots, tensors, strict=False):
            if at[0] in "xy":
                x = x.unsqueeze(1 if at[0] == "x" else 0)
            values[at] = x.detach().requires_grad_() if at in self.learned else x
        return self.given.changed(values)

    def sizes(self, side: int) -> tuple[int, int]:
        """Return two sizes that differ from each other and from all others: a compiler takes equal ones for one."""
        taken = {size for x in self.given.parameters.values() if isinstance(x, Tensor) for size in x.shape}
        first, second, *_ = (size for size in range(max(side, 8), 0, -1) if size not in taken)
        return first, second


def compiled(function: Function, example: Sequence[Tensor]) -> Function:
    """Return a function of tensors, compiled for all sizes; those of the example differ where sizes may differ."""
    from torch.fx.experimental.proxy_tensor import make_fx  # imports sympy

    graph = make_fx(function, tracing_mode="symbolic")(*example)
    return torch.compile(graph, dynamic=True)


def _resized(x: Tensor, letter: str, sizes: tuple[int, int]) -> Tensor:
    """Return a tensor of a tile with other numbers of rows and columns, some of them repeated."""
    for dim, size, letters in ((0, sizes[0], "sx"), (1 if letter == "s" else 0, sizes[1], "sy")):
        if letter and letter in letters:
            x = x.index_select(dim, torch.arange(size, device=x.device) % x.shape[dim])
    return x


def _cut(x: Tensor, letter: str) -> Tensor:
    """Return a tensor of a tile with few rows and columns."""
    if letter == "s":
        return x[: _FEW[0], : _FEW[1]].contiguous()
    return x[: _FEW[0]] if letter == "x" else x[: _FEW[1]] if letter == "y" else x


def _check(run: Function, plain: Function, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless a kernel and the function that it was traced from agree."""
    for found, expected in zip(run(*tensors), plain(*tensors), strict=True):
        tolerance = 1e-3 if min(found.dtype.itemsize, *(x.dtype.itemsize for x in tensors if x.is_floating_point())) < 8 else 1e-9
        finite = torch.where(expected.isfinite(), expected, 0.0)
        largest = float(finite.abs().amax()) if finite.numel() else 0.0
        if not torch.allclose(found, expected, tolerance, tolerance * max(largest, 1e-30), equal_nan=True):
            raise ValueError(
                "a compiled function and the declared one differ on a few entries; a score or a mask must not depend "
                "on Python variables that change between calls: pass these in parameters"
            )


def _nowhere(of: Reduced, like: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return numbers of a rule at which every entry has the weight 0."""
    values = [0.0] * of.rule.constants
    if "scaled" in of.rule.kinds:
        values[0] = torch.finfo(dtype).max / _NOWHERE
    return [torch.full_like(like, value, dtype=dtype) for value in values]
