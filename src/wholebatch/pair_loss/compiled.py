"""Tiles that are computed by compiled functions: masks, scores and reductions in a few passes, dL/ds in one or two.

    forward    products, data, parameters, kept numbers            -> kept numbers of rows and columns
    backward   products, data, parameters, the numbers of rules    -> gradients of all of these that are learned

Each direction is traced once, the user's functions and autograd's operations alike, with sizes as symbols, and compiled
for all tiles. Entries that are no candidates always reach scores as safe values: here they cost no pass over the tile.

The user's functions run only while they are traced. What they read in Python is part of the key under which a kernel is
kept, see `fingerprint`; and a few entries of each pass are computed by eager PyTorch as well. If these differ, or
anything fails, this rank continues with plain tiles. It need not tell others at once: tiles do not communicate. All
ranks hear of it when they agree on the next call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..partition import Tile
from .tile import Leaves, Masks, PlainTiles, Reduced, Slot, collect, sides_of, update_

_FEW = (16, 15)  # entries that are computed in both ways
_MOST = 16  # kernels of a declaration, two for each kind of call
_CLOSE, _CLOSE_IN_FLOAT64 = 1e-3, 1e-9

Function = Callable[..., list[Tensor]]


@dataclass(frozen=True)
class Kernel:
    """A compiled function of tensors, and the places of the gradients that it returns."""

    run: Function
    places: list[Slot]


@dataclass
class Kernels:
    """The kernels of a declared loss, by what they were traced with. Copies of the loss start without any.

    Attributes:
        by_key: the kernels.
        failure: why there are none; "": nothing has failed.
    """

    by_key: dict[str, Kernel] = field(default_factory=dict)
    failure: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return Kernels, ()

    def give_up(self, reason: str) -> None:
        """Use plain tiles from now on."""
        self.failure = reason
        self.by_key.clear()


class CompiledTiles:
    """The tiles of one pass that compiled functions compute, and plain ones where there are none.

    Args:
        plain: the same tiles without the compiler.
        kernels: where compiled functions are kept.
        signature: of the declaration.
        side: rows and columns of a tile.
    """

    def __init__(self, plain: PlainTiles, kernels: Kernels, signature: str, side: int) -> None:
        self.plain, self.kernels, self.signature, self.side = plain, kernels, signature, side
        self.reduced = plain.reduced
        self._kernel: Kernel | None = None
        self._numbers = dict[Slot, Tensor]()
        self._dtypes = list[torch.dtype]()

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
        form = _Form(leaves, self._numbers)
        inputs = _Inputs(form)
        for number, reduced in enumerate(self.reduced):
            # On the diagonal of a symmetric matrix the sums of columns are computed as well, and dropped.
            for letter, read, mine in (("x", reduced.rows, rows[number]), ("y", reduced.cols, cols[number])):
                kept = rows[number] if mine is None else mine
                if read and kept is not None:
                    inputs.add(letter, kept.contiguous())  # a row may hold further terms' numbers
        if any("index" in reduced.rule.kinds for reduced in self.reduced):
            for first in firsts:
                inputs.add("", torch.full((), first, device=form.device))

        def function(*tensors: Tensor) -> list[Tensor]:
            kept = iter(tensors[form.count :])
            kept_by_term = [[next(kept).clone() if read else None for read in (r.rows, r.cols)] for r in self.reduced]
            starts: tuple[int | Tensor, int | Tensor] = (next(kept, 0), next(kept, 0))
            entries = form.leaves(tensors).entries()
            for reduced, (row_numbers, col_numbers) in zip(self.reduced, kept_by_term, strict=True):
                values = replace(entries.values(reduced.term, entries.mask(reduced.term), safe=False), fused=True)
                update_(reduced, values, row_numbers, col_numbers, starts)
            return [x for kept_numbers in kept_by_term for x in kept_numbers if x is not None]

        results = self._call("forward", tile, inputs, function, [])
        if results is None:
            self.plain.update_(tile, leaves, masks, rows, cols, firsts)
            return
        new = iter(results)
        for number, reduced in enumerate(self.reduced):
            for read, mine in ((reduced.rows, rows[number]), (reduced.cols, cols[number])):
                if read:
                    result = next(new)
                    if mine is not None:
                        mine.copy_(result)

    def gradients(
        self,
        tile: Tile,
        leaves: Leaves,
        masks: Masks,
        rows: Sequence[Sequence[Tensor]],
        cols: Sequence[Sequence[Tensor]],
    ) -> dict[Slot, Tensor]:
        """Return the gradients of a tile's leaves, as `PlainTiles` does."""
        form = _Form(leaves, self._numbers)
        inputs = _Inputs(form)
        self._dtypes = self._dtypes or _dtypes_of_scores(leaves, self.reduced)
        learned = [number for number, reduced in enumerate(self.reduced) if reduced.rule.constants]
        for number in learned:
            reduced, dtype = self.reduced[number], self._dtypes[number]
            for letter, read, mine in (("x", reduced.rows, rows[number]), ("y", reduced.cols, cols[number])):
                if read:  # on the diagonal of a symmetric matrix there are no numbers of columns
                    for x in mine or _without_weight(reduced, rows[number]):
                        inputs.add(letter, x.to(dtype))
        places = list[Slot]()

        def function(*tensors: Tensor) -> list[Tensor]:
            numbers = iter(tensors[form.count :])
            outputs = list[tuple[Tensor, Tensor]]()
            with torch.enable_grad():
                traced = form.leaves(tensors)
                entries = traced.entries()
                for number in learned:
                    reduced, rule = self.reduced[number], self.reduced[number].rule
                    row_constants, col_constants = (
                        _next(numbers, rule.constants * read) for read in (reduced.rows, reduced.cols)
                    )
                    values = replace(entries.values(reduced.term, entries.mask(reduced.term)), fused=True)
                    collect(rule, values, sides_of(row_constants, col_constants), outputs)
                grads = traced.gradients(*zip(*outputs, strict=True)) if outputs else {}
            places[:] = grads
            return [grad.detach() for grad in grads.values()]

        results = self._call("backward", tile, inputs, function, places)
        if results is None:
            return self.plain.gradients(tile, leaves, masks, rows, cols)
        assert self._kernel is not None
        return dict(zip(self._kernel.places, results, strict=True))

    def _call(
        self, direction: str, tile: Tile, inputs: _Inputs, function: Function, places: list[Slot]
    ) -> list[Tensor] | None:
        """Return what the kernel of a function computes; None: the tile has to be computed without."""
        if self.kernels.failure or min(tile.shape) < 2:
            return None  # a compiler takes a size of 1 for a constant
        try:
            if self._kernel is None:
                kernel = self._kernel_of(direction, inputs, function, places)
                _check(kernel.run, function, inputs.cut())
                self._kernel = kernel
            return self._kernel.run(*inputs.tensors)
        except Exception as error:  # of the compiler; plain tiles raise again what is the user's
            self.kernels.give_up(f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}")
            return None

    def _kernel_of(self, direction: str, inputs: _Inputs, function: Function, places: list[Slot]) -> Kernel:
        """Return the kernel of a function, which fills `places` while it is traced."""
        terms = [(reduced.name, reduced.rows, reduced.cols) for reduced in self.reduced]
        key = repr((direction, self.signature, terms, inputs.described))
        if key not in self.kernels.by_key:
            if len(self.kernels.by_key) >= _MOST:
                raise ValueError(
                    f"{_MOST // 2} kinds of calls, by dtypes, shapes of parameters, integers among them and numbers "
                    "that functions read elsewhere, were compiled, and there are more; pass floats or tensors in "
                    "parameters"
                )
            example = inputs.resized(self.side)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of torch's own code
                kernel = Kernel(compiled(function, example), places)
                kernel.run(*example)
            self.kernels.by_key[key] = kernel
        return self.kernels.by_key[key]


class _Form:
    """How a tile's leaves are passed as tensors, one after the other, and made into leaves again.

    Args:
        leaves: of the tile.
        numbers: the tensors of Python's numbers among them.
    """

    def __init__(self, leaves: Leaves, numbers: dict[Slot, Tensor]) -> None:
        products = next(iter(leaves.products.values()))
        self.original, self.numbers, self.dtype, self.device = leaves, numbers, products.dtype, products.device
        self.slots = [(key, x) for key, x in leaves.slots() if isinstance(x, Tensor | float)]
        self.learned = {key for key, x in self.slots if isinstance(x, Tensor) and x.requires_grad}
        self.count = len(self.slots)

    @property
    def described(self) -> list[Any]:
        """Everything that a kernel depends on beside the user's functions, except for rows and columns."""
        tensors = [(key, str(x.dtype) if isinstance(x, Tensor) else "", key in self.learned) for key, x in self.slots]
        parameters = [
            (name, tuple(x.shape) if isinstance(x, Tensor) else "" if isinstance(x, float) else x)
            for name, x in self.original.parameters.items()
        ]
        return [tensors, parameters, str(self.dtype), str(self.device)]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield letters and tensors; numbers of rows and columns are vectors."""
        for key, x in self.slots:
            if not isinstance(x, Tensor):
                if key not in self.numbers:
                    self.numbers[key] = torch.full((), x, dtype=self.dtype, device=self.device)
                x = self.numbers[key]
            yield key[0], x.detach().reshape(-1) if key[0] in ("x", "y") else x.detach()

    def leaves(self, tensors: Sequence[Tensor]) -> Leaves:
        """Return leaves with the first of these tensors."""
        values = {}
        for (key, _), x in zip(self.slots, tensors, strict=False):
            if key[0] in "xy":
                x = x.unsqueeze(1 if key[0] == "x" else 0)
            values[key] = x.detach().requires_grad_() if key in self.learned else x
        return self.original.changed(values)


class _Inputs:
    """The tensors that a kernel gets, each with a letter.

    "s" is a tile, "x" has a number or more for each of its rows, "y" for each of its columns, and the rest has neither.
    """

    def __init__(self, form: _Form) -> None:
        self.form, self.letters, self.tensors = form, list[str](), list[Tensor]()
        for letter, x in form.tensors():
            self.add(letter, x)

    def add(self, letter: str, x: Tensor) -> None:
        """Append a tensor; numbers of rows and columns are copied, because a compiler also looks at bases of views."""
        self.letters.append(letter)
        self.tensors.append(x.clone() if letter in ("x", "y") else x)

    @property
    def described(self) -> list[Any]:
        """Everything that a kernel depends on beside the user's functions, except for rows and columns."""
        modes = torch.is_inference_mode_enabled(), torch.get_num_threads(), torch.get_default_dtype()
        return [self.form.described, [(str(x.dtype), x.is_inference()) for x in self.tensors], modes]

    def cut(self) -> list[Tensor]:
        """Return the tensors of a few rows and columns, from all over the tile: those of one corner may be masked."""
        pairs = zip(self.letters, self.tensors, strict=True)
        shape = next(tuple(x.shape) for letter, x in pairs if letter == "s")
        device = self.tensors[0].device
        rows, cols = (
            torch.linspace(0, size - 1, min(size, few), device=device).long()
            for size, few in zip(shape, _FEW, strict=True)
        )
        cuts: dict[str, Callable[[Tensor], Tensor]] = {
            "s": lambda x: x[rows][:, cols].contiguous(),
            "x": lambda x: x[rows],
            "y": lambda x: x[cols],
        }
        return [cuts[letter](x) if letter in cuts else x for letter, x in zip(self.letters, self.tensors, strict=True)]

    def resized(self, side: int) -> list[Tensor]:
        """Return the tensors of a whole tile, with entries repeated, if need be.

        Its rows and columns differ in number, from each other and from all other sizes: a compiler takes numbers that
        are equal in an example for one.
        """
        pairs = [*zip(self.letters, self.tensors, strict=True)]
        sizes = {size for letter, x in pairs if letter != "s" for size in x.shape[letter in ("x", "y") :]}
        rows, cols, *_ = (size for size in range(max(side, _FEW[0] + len(sizes)), 1, -1) if size not in sizes)
        resized = []
        for letter, x in pairs:
            if letter in ("s", "x"):
                x = x.index_select(0, torch.arange(rows, device=x.device) % len(x))
            if letter in ("s", "y"):
                dim = 1 if letter == "s" else 0
                x = x.index_select(dim, torch.arange(cols, device=x.device) % x.shape[dim])
            resized.append(x)
        return resized


def compiled(function: Function, example: Sequence[Tensor]) -> Function:
    """Return a function of tensors, compiled for all sizes; those of the example differ where sizes may differ."""
    # The import takes a second, which only this way of computing should cost. torch documents no other tracer that
    # takes the operations of autograd's backward pass into the graph.
    from torch.fx.experimental.proxy_tensor import make_fx

    traced = make_fx(function, tracing_mode="symbolic")(*example)
    _sum_in_two_steps_(traced.graph)
    traced.recompile()
    return torch.compile(traced, dynamic=True)


def _sum_in_two_steps_(graph: torch.fx.Graph) -> None:
    """Sum a whole tile first along its rows: one long sum is slower, and compiled once more for small tiles."""
    sums: tuple[Any, ...] = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default)
    for node in list(graph.nodes):
        if node.target in sums and node.args[0].meta["val"].dim() == 2:
            dims = node.args[1] if len(node.args) > 1 else (0, 1)
            if len(dims) == 2:
                with graph.inserting_before(node):
                    row_sums = graph.call_function(sums[0], (node.args[0], [1], True))
                node.args = (row_sums, *node.args[1:])


def _check(run: Function, plain: Function, tensors: Sequence[Tensor]) -> None:
    """Raise ValueError unless a kernel and the function that it was traced from agree."""
    single = any(x.is_floating_point() and x.dtype.itemsize < 8 for x in tensors)
    close = _CLOSE if single else _CLOSE_IN_FLOAT64
    for result, expected in zip(run(*tensors), plain(*tensors), strict=True):
        finite = torch.where(expected.isfinite(), expected, 0.0).abs()
        # A sum over entries, such as the gradient of a parameter, may cancel: it is as exact as its largest part.
        if not torch.allclose(result, expected, close, close * max(1.0, float(finite.max())), equal_nan=True):
            raise ValueError(
                "a compiled function and the declared one differ on a few entries; a score or a mask must not read "
                "Python variables that change between calls: pass these in parameters"
            )


def _dtypes_of_scores(leaves: Leaves, reduced: Sequence[Reduced]) -> list[torch.dtype]:
    """Return the dtypes of all terms' scores."""
    with torch.no_grad():
        entries = leaves.entries().first(2)
        values = [entries.values(each.term, None).value for each in reduced]
    return [torch.float32 if x is None else x.dtype for x in values]


def _without_weight(reduced: Reduced, like: Sequence[Tensor]) -> list[Tensor]:
    """Return numbers of a rule, as many as there are, at which every entry has the weight 0."""
    numbers = [torch.zeros_like(x) for x in like]
    if "scaled" in reduced.rule.kinds:  # exp(f - shift) must not overflow
        numbers[0].fill_(torch.finfo(torch.float32).max / 2)
    return numbers


def _next(numbers: Iterator[Tensor], count: int) -> list[Tensor]:
    return [next(numbers) for _ in range(count)]
