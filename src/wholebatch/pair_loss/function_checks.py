"""Compute a small tile at first use, before any communication, and find functions that no sweep can compute.

    forbidden acts         captured tensors, random draws and writes, see `function_guard`
    mixed entries          a value that depends on other entries: it differs when the tile is cut into two
    shapes and dtypes      masks that are not boolean, scores and losses of another shape

The same tile tells which terms each side reads, and which data. A tile of numbers that are the same on all ranks shows
functions that differ by something that no fingerprint sees: a numpy array, a class attribute, the environment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from .._base.checks import check_not_negative
from .._base.settings import shown
from .affine import is_affine, may_be_affine
from .function_guard import watched
from .reductions import Mean, Partner, Term
from .row_data import INDEX, PARTNER, Fields, changed
from .similarity import DISTANCE, ONE
from .tile_entries import Entries, Values

_ROWS, _COLUMNS = 4, 6
_CUTS = ((slice(0, 1), slice(0, 6)), (slice(1, 4), slice(0, 6)), (slice(0, 4), slice(0, 2)), (slice(0, 4), slice(2, 6)))
_ALL, _SQUARE = slice(None), slice(0, _ROWS)
_CLOSE = 1e-4
_SAME = 1e-5  # relative, between ranks: other processors round differently
_ON = f"a tile of {_ROWS} rows and {_COLUMNS} columns"


@dataclass
class Reads:
    """The names that a declaration's functions read.

    Attributes:
        rows: terms that the row loss reads.
        cols: terms that the column loss reads.
        x, y: data that scores read, and of these partners that row and column losses read.
        p: parameters that any function reads.
        ties: "x" or "y", if scores or masks that may jump read partners of these: equal similarities have to be found.
    """

    rows: set[str] = field(default_factory=set)
    cols: set[str] = field(default_factory=set)
    x: set[str] = field(default_factory=set)
    y: set[str] = field(default_factory=set)
    p: set[str] = field(default_factory=set)
    ties: set[str] = field(default_factory=set)

    @property
    def names(self) -> dict[str, list[str]]:
        """The names as JSON."""
        return {key: sorted(names) for key, names in vars(self).items()}

    @classmethod
    def union(cls, names_of_ranks: Sequence[Mapping[str, Sequence[str]]]) -> Reads:
        """Return everything that is read on any rank: functions may look at their data, which differ."""
        return cls(**{key: set().union(*(names[key] for names in names_of_ranks)) for key in names_of_ranks[0]})

    @property
    def terms(self) -> set[str]:
        """The terms that either side reads."""
        return self.rows | self.cols

    @property
    def partner(self) -> bool:
        """Whether a score reads partners."""
        return PARTNER in self.x or PARTNER in self.y


def first_use(
    terms: Mapping[str, Term],
    functions: tuple[Callable[..., Any] | None, Callable[..., Any] | None],
    kinds: Mapping[str, str],
    data: tuple[Mapping[str, Tensor], Mapping[str, Tensor], Mapping[str, Tensor] | None],
    parameters: Mapping[str, Any],
    *,
    device: torch.device,
    symmetric: bool = False,
    values: dict[str, list[float]] | None = None,
) -> Reads:
    """Return what the functions read, or raise.

    Args:
        terms: of the declaration.
        functions: its row loss and its column loss.
        kinds: its similarities, by name.
        data: the numbers of rows, of columns, and of own candidates or None; a few of them are used.
        parameters: by name.
        device: of the features, the data and the parameters.
        symmetric: whether scores and masks have to be symmetric.
        values: gets the values of the functions, by name, on numbers that are the same on all ranks.

    Raises:
        ValueError: naming the function, what it did, and the fix.
    """
    reads, jumps, pick, values = Reads(), False, _sample if values is None else _fixed, {} if values is None else values
    x, y, own = (
        None if numbers is None else {name: pick(x, n) for name, x in numbers.items()}
        for numbers, n in zip(data, (_ROWS, _COLUMNS, _COLUMNS), strict=True)
    )
    assert x is not None
    assert y is not None
    p = _doubles(parameters) if pick is _sample else _fixed_parameters(parameters)
    for name, term in terms.items():
        columns = y if term.over != "own" else own
        if term.over != "batch" and own is None:
            raise ValueError(f"term {name!r} has over={term.over!r} and needs candidates=, each row's own candidates")
        assert columns is not None
        tile = _tile(kinds, x, columns, p, reads, device)
        values[f"term {name!r}"] = _check_term(name, term, tile)
        jumps = jumps or not _is_continuous(term, tile)
        if term.over != "batch":
            assert own is not None
            _check_term(name, term, _without_partner(_tile(kinds, x, own, p, reads, device)))
    reads.ties |= {letter for letter in "xy" if jumps and PARTNER in getattr(reads, letter)}
    for name, function, read, side in (
        ("row_loss", functions[0], reads.rows, x),
        ("column_loss", functions[1], reads.cols, y),
    ):
        if function is not None:
            values[name] = _check_loss(name, function, terms, side, (kinds, p, read, reads), device)
    if symmetric:
        rows = {name: _sample(x, _ROWS) for name, x in data[0].items()}
        for name, term in terms.items():
            _check_symmetry(name, term, _part(_tile(kinds, rows, rows, p, Reads(), device), _ALL, _SQUARE))
    return reads


def _is_continuous(term: Term, entries: Entries) -> bool:
    """Return whether rounding of a similarity cannot matter much: no mask reads it, and the score is affine."""
    affine = isinstance(term, Partner) or (may_be_affine(term, entries.kinds) and is_affine(term, entries))
    return not term.mask_reads_similarity and (affine or not term.scored)


def check_same_values(caller: str, texts_of_ranks: Sequence[str]) -> None:
    """Raise ValueError, on all ranks, if a function has other values on a rank than on rank 0."""
    values = [json.loads(text or "{}") for text in texts_of_ranks]
    for rank, others in enumerate(values):
        for label in (name for name in values[0] if name in others):
            for a, b in zip_longest(values[0][label], others[label], fillvalue=math.inf):
                if a != b and not math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-12) and not (a != a and b != b):
                    raise ValueError(
                        f"{caller}: {label} must compute alike on all ranks, got {a} on rank 0 and {b} on rank {rank} "
                        "from the same numbers; run the same program with the same files and environment on all "
                        "ranks, and pass numbers in parameters"
                    )


def _fixed(x: Tensor, *shape: int) -> Tensor:
    """Return numbers that are the same on all ranks, on a CPU: there a wrong index of a table ends no process."""
    even = torch.linspace(0.25, 0.75, math.prod(shape), dtype=torch.float64, device="cpu").view(shape)
    return (even if x.is_floating_point() else even * 100 // 1 % 2).to(x.dtype)


def _fixed_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return numbers of the same kinds as these parameters, the same on all ranks, on a CPU."""
    fixed = {name: _fixed(x, *x.shape) if isinstance(x, Tensor) else x for name, x in parameters.items()}
    return _doubles(fixed)


def _doubles(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters without a graph, in float64."""
    p = {name: x.detach() if isinstance(x, Tensor) else x for name, x in parameters.items()}
    return {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in p.items()}


def fixed_tile(
    kinds: Mapping[str, str], data: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], parameters: Mapping[str, Any]
) -> Entries:
    """Return a tile of numbers that are the same on all ranks, on a CPU."""
    x, y = (
        {name: _fixed(value, count) for name, value in numbers.items()}
        for numbers, count in zip(data, (_ROWS, _COLUMNS), strict=True)
    )
    return _tile(kinds, x, y, _fixed_parameters(parameters), Reads(), torch.device("cpu"))


def _sample(x: Tensor, rows: int) -> Tensor:
    """Return a few of a vector's numbers, some several times if it is short; zeros if it is empty."""
    x = x.detach()
    return x[torch.arange(rows, device=x.device) % len(x)] if len(x) else x.new_zeros(rows)


def _tile(
    kinds: Mapping[str, str],
    x: Mapping[str, Tensor],
    y: Mapping[str, Tensor],
    p: Mapping[str, Any],
    reads: Reads,
    device: torch.device,
) -> Entries:
    """Return a tile of similarities that differ from each other, away from 0 and 1."""
    dtype = torch.float64
    even = torch.linspace(0.2, 0.8, _ROWS * _COLUMNS, dtype=dtype, device=device).view(_ROWS, _COLUMNS)
    s = {name: -even if kind == DISTANCE else even for name, kind in kinds.items()}
    rows = _columns({**x, **_partners(kinds, _ROWS, dtype, device), INDEX: torch.arange(_ROWS, device=device)}, 1)
    cols = _columns({**y, **_partners(kinds, _COLUMNS, dtype, device), INDEX: torch.arange(_COLUMNS, device=device)}, 0)
    return Entries(kinds, s, rows, cols, p, {"x": reads.x, "y": reads.y, "p": reads.p})


def _partners(kinds: Mapping[str, str], rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    even = torch.linspace(0.3, 0.7, rows, dtype=dtype, device=device)
    each = {name: -even if kind == DISTANCE else even for name, kind in kinds.items()}
    return {PARTNER: each[ONE] if ONE in each else Fields("s", each)}


def _columns(numbers: Mapping[str, Any], dim: int) -> dict[str, Any]:
    return changed(numbers, lambda x: x.unsqueeze(dim))


def _part(entries: Entries, rows: slice, cols: slice) -> Entries:
    """Return a part of a tile."""
    s = changed(entries.s, lambda x: x[rows, cols])
    x, y = changed(entries.x, lambda x: x[rows]), changed(entries.y, lambda x: x[:, cols])
    return Entries(entries.kinds, s, x, y, entries.p)


def _check_term(name: str, term: Term, entries: Entries) -> list[float]:
    text = f"the {' or '.join(term.functions) or 'score'} of term {name!r}"
    values = watched(text, term.functions, _tensors(entries), lambda: _every_entry(name, term, entries), on=_ON)
    _check_gradient(f"the score of term {name!r}", term, entries)
    _check_slope(f"term {name!r}", term, entries)
    parts = [(_part(entries, rows, cols), (rows, cols)) for rows, cols in _CUTS]
    for part, cut in [*parts, (_as_list(entries), None)]:
        for whole, part_values in zip(_numbers(values), _numbers(_every_entry(name, term, part)), strict=True):
            expanded = whole.expand(values.shape)
            expected = expanded.reshape(-1, 1) if cut is None else expanded[cut]
            if not torch.allclose(expected, part_values.expand(part.shape), _CLOSE, _CLOSE, equal_nan=True):
                raise ValueError(
                    f"{text} must compute each entry from its own s, x, y and p alone; its values change when the tile "
                    "is cut: use terms for sums, means and maxima over entries, and combine these in row_loss"
                )
    return [number for x in _numbers(values) for number in x.flatten().tolist()]


def _check_gradient(label: str, term: Term, entries: Entries) -> None:
    """Raise ValueError if a score cannot be computed where similarities have a gradient: NumPy's functions cannot."""
    if not term.scored:
        return
    try:
        with torch.enable_grad():
            replace(entries, s=changed(entries.s, lambda s: s.detach().requires_grad_())).values(term, None)
    except Exception as error:  # whatever a user's function raises
        raise ValueError(
            f"{label} must have a gradient, and failed with one: {type(error).__name__}: {error}; use functions of "
            "torch, such as torch.exp(s) for numpy.exp(s)"
        ) from error


def _check_slope(label: str, term: Term, entries: Entries) -> None:
    """Raise ValueError unless a given slope is the derivative of the score."""
    if term.slope is None:
        return
    if ONE not in entries.s:
        raise ValueError(f"{label}: slope must be left out with several similarities; autograd takes all derivatives")
    with torch.enable_grad():
        s = entries.s[ONE].detach().requires_grad_()
        learned = replace(entries, s={ONE: s})
        value, slope = learned.values(term, None).value, learned.call(term.slope)
        assert value is not None
        _check_shape(f"slope of {label}", slope, entries.shape)
        grad = torch.autograd.grad(value.expand(entries.shape).sum(), s, allow_unused=True)[0]
    expected = torch.zeros_like(s) if grad is None else grad
    if not torch.allclose(slope.detach().double().expand(entries.shape), expected, _CLOSE, _CLOSE):
        raise ValueError(f"{label}: slope must be the derivative of the score by s, and differs from autograd's")


def _every_entry(name: str, term: Term, entries: Entries) -> Values:
    """Return the checked values of a term, whose scores count at all entries, whatever its mask is."""
    values = _values(name, term, entries)
    if not term.scored:
        return values
    unmasked = entries.values(term, None)
    return replace(unmasked, mask=values.mask)


def _as_list(entries: Entries) -> Entries:
    """Return the entries of a tile as a list of pairs, (k, 1)."""
    s, x, y = (
        changed(numbers, lambda x: x.expand(entries.shape).reshape(-1, 1))
        for numbers in (entries.s, entries.x, entries.y)
    )
    return Entries(entries.kinds, s, x, y, entries.p)


def _without_partner(entries: Entries) -> Entries:
    """Return the entries of own candidates, which are nobody's partners."""
    return replace(entries, y={name: x for name, x in entries.y.items() if name != PARTNER})


def _numbers(values: Values) -> list[Tensor]:
    """Return everything that was computed of a tile: masks as numbers, and other numbers where they count."""
    masks = [] if values.mask is None else [values.mask.double()]
    return [*masks, *(x.detach().double() for x in (values.value, values.log_weight) if x is not None)]


def _values(name: str, term: Term, entries: Entries) -> Values:
    """Return the values of a term, whose shapes and dtypes are checked."""
    mask = entries.mask(term)
    if term.where is not None:
        _check_shape(f"where of term {name!r}", mask, entries.shape)
        assert mask is not None
        if mask.dtype != torch.bool:
            raise ValueError(f"where of term {name!r} must return booleans, got {mask.dtype}; compare, or use .bool()")
    values = entries.values(term, mask)
    outputs: list[tuple[str, Any]] = [("score", values.value)] if term.scored else []
    if isinstance(term, Mean) and term.log_weight is not None:
        outputs.append(("log_weight", values.log_weight))
    for function, x in outputs:
        label = f"{function} of term {name!r}"
        if isinstance(x, Fields):
            raise ValueError(
                f"{label} must return a tensor, got {x!r}: read one of these, such as lambda s, x, y, p: "
                f"{str(x).split()[0]}.{next(iter(x), 'name')}; the arguments come in this order"
            )
        _check_shape(label, x, entries.shape)
        assert x is not None
        if not x.is_floating_point():
            raise ValueError(
                f"{label} must return floating-point numbers, got {x.dtype}; use Count for numbers of entries"
            )
    return values


def _check_shape(label: str, x: object, shape: tuple[int, ...]) -> None:
    if not isinstance(x, Tensor):
        fix = "leave it out if all pairs are candidates" if label.startswith("where") else "torch.full_like(s, number)"
        raise ValueError(f"{label} must return a tensor, got {shown(x)}; {fix}")
    # torch.broadcast_shapes takes a tenth of the first call
    if x.dim() > len(shape) or any(n not in (1, size) for n, size in zip(x.shape[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"{label} must return one value for each entry, {shape} in a tile like this, got {tuple(x.shape)}"
        )


def _check_loss(
    label: str,
    function: Callable[..., Any],
    terms: Mapping[str, Term],
    side: Mapping[str, Tensor],
    other: tuple[Mapping[str, str], Mapping[str, Any], set[str], Reads],
    device: torch.device,
) -> list[float]:
    kinds, p, read, reads = other
    rows = _ROWS
    # Differences of two terms have both signs, and no two are equal: a mean of any of them would show.
    uneven = torch.tensor([0.4, 1.7, 0.9, 1.3], dtype=torch.float64, device=device)
    r = {name: uneven.roll(number) * (1 + 0.3 * number) for number, name in enumerate(terms)}
    numbers: dict[str, Any] = {name: _sample(x, rows) for name, x in side.items()}
    numbers |= {**_partners(kinds, rows, torch.float64, device), INDEX: torch.arange(rows, device=device)}
    letter = "x" if label == "row_loss" else "y"

    def call(cut: slice) -> list[Tensor]:
        cut_terms = Fields("r", {name: x[cut] for name, x in r.items()}, read)
        cut_numbers = Fields(letter, changed(numbers, lambda x: x[cut]), reads.x)
        return losses_and_weights(
            label, function(cut_terms, cut_numbers, Fields("p", p, reads.p)), len(range(rows)[cut]), checks=False
        )

    plain = [x for x in (*numbers.values(), *p.values()) if isinstance(x, Tensor)]
    tensors = [*r.values(), *plain, *(x[key] for x in numbers.values() if isinstance(x, Fields) for key in x)]
    whole = watched(label, {label: function}, tensors, lambda: call(slice(0, rows)), on=f"{rows} rows")
    for cut in (slice(0, 1), slice(1, rows)):
        losses = call(cut)
        if len(losses) != len(whole) or not all(
            torch.allclose(x[cut], part, _CLOSE, _CLOSE, equal_nan=True) for x, part in zip(whole, losses, strict=True)
        ):
            raise ValueError(
                f"{label} must compute the loss of each row from its own numbers alone; its values change when the "
                "rows are cut: the mean over rows is taken afterwards, and a function of it belongs outside"
            )
    return [number for x in whole for number in x.tolist()]


def losses_and_weights(label: str, returned: Any, rows: int, *, caller: str = "", checks: bool = True) -> list[Tensor]:
    """Return what a row loss has returned: losses, or losses and weights, checked."""
    parts: Sequence[Any] = returned if isinstance(returned, tuple) else (returned,)
    if len(parts) not in (1, 2):
        raise ValueError(f"{caller}{label} must return losses, or (losses, weights), got {len(parts)} values")
    for part in parts:
        if not isinstance(part, Tensor) or tuple(part.shape) != (rows,):
            got = tuple(part.shape) if isinstance(part, Tensor) else shown(part)
            raise ValueError(f"{caller}{label} must return one number for each row, shape ({rows},), got {got}")
    for weights in (x.detach().double() for x in parts[1:] if rows and checks):
        smallest, total = torch.stack([weights.amin(), weights.sum()]).tolist()
        check_not_negative(f"the weights that {label} returns", weights, smallest, total)
    return [*parts]


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted losses: a row of weight 0 does not count, though its loss is infinite or NaN."""
    return weight * torch.where((weight == 0) & ~loss.isfinite(), 0.0, loss)


def _check_symmetry(name: str, term: Term, entries: Entries) -> None:
    """Raise ValueError unless masks and scores of a square tile, whose similarities are symmetric, are symmetric."""
    even = {key: (s + s.T) / 2 for key, s in entries.s.items()}
    partner = entries.x[PARTNER]
    turned = Fields("s", {key: partner[key].T for key in partner}) if isinstance(partner, Fields) else partner.T
    values = _values(name, term, replace(entries, s=even, y={**entries.y, PARTNER: turned}, reads=None))
    for x in _numbers(values):
        whole = x.expand(values.shape)
        if not torch.allclose(whole, whole.T, _CLOSE, _CLOSE, equal_nan=True):
            raise ValueError(
                f"term {name!r} must have equal masks and scores for (i, j) and (j, i) with symmetric=True, and they "
                "differ; pass symmetric=False, or read x and y alike"
            )


def _tensors(entries: Entries) -> list[Tensor]:
    field_values = [x[key] for x in (*entries.x.values(), *entries.y.values()) if isinstance(x, Fields) for key in x]
    plain = [*entries.s.values(), *entries.x.values(), *entries.y.values(), *entries.p.values(), *field_values]
    return [x for x in plain if isinstance(x, Tensor)]
