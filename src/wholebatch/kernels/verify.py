"""A self-check of kernels: each launch is repeated in surroundings that show mistakes, and compared with float64.

A kernel may be compiled wrongly for a GPU on which nobody has run it. Inside of :func:`verifying`

* features lie between NaN: a missing mask of a load makes a result NaN
* a result's memory is NaN before, so that an entry that is not written shows
* beyond a result's memory is more NaN: a missing mask of a store overwrites some of it
* each result is compared with `expected`, entry by entry: its error is at most the rounding to its dtype, and those
  that products and sums on tensor cores make before it

The error that is raised says which result of which kernel is wrong, where, and how far beyond the allowed error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from math import prod
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from .._base.normalize import EPS
from . import angles, expected, launch, nested, rows, sigmoid, softmax, tokens
from .nested import NestedTile
from .tokens import TokenTile

_P = ParamSpec("_P")
_R = TypeVar("_R")
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
_TINY = {torch.float16: 2.0**-24}  # the absolute error of numbers below the normal ones
_OF_ROWS = 2.0**-16  # relative to the terms of a result: a row is summed in the order of its features
_AROUND = 16  # features beside those of a row; the alignment of rows stays
_EARLIER = 7  # to each seventh entry of a sum 1 is added before, which a kernel must keep
_BESIDE = 1024  # entries before and after a result


class KernelError(RuntimeError):
    """A kernel gave a wrong result in a self-check."""


class _OfRows(NamedTuple):
    """A form of `rows.row_gradient`: its pairs, norms, an index, a unit, a factor on the device, and rounding."""

    paired: bool
    normed: bool
    divided: bool
    placed: bool
    in_units: bool
    loaded: bool
    rounded: bool


_OF_ROWS_FORMS = tuple(  # p: pairs, n: norms, d: divided, i: an index, u: a unit, l: a loaded factor, r: rounded
    _OfRows(*(letter in form for letter in "pndiulr"))
    for form in ("pr", "l", "pulr", "u", "pndr", "pndl", "nl", "nir", "ni", "pnu")
)


@dataclass
class _Memory:
    """The memory of results, each with NaN before, inside and after it; of integers, with the largest one."""

    whole: list[tuple[Tensor, int]] = field(default_factory=list)  # with the numbers before a result, and after it

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, beside: int = _BESIDE) -> Tensor:
        count = prod(shape)
        fill = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        buffer = like.new_full((count + 2 * beside,), fill, dtype=dtype)
        self.whole.append((buffer, beside))
        return buffer[beside : beside + count].view(shape)

    def is_left_alone(self) -> bool:
        """Return whether nothing was written beside the results."""
        return all(_is_untouched(buffer[:beside]) and _is_untouched(buffer[-beside:]) for buffer, beside in self.whole)


def _is_untouched(x: Tensor) -> bool:
    return bool(x.isnan().all() if x.is_floating_point() else (x == torch.iinfo(x.dtype).max).all())


@contextmanager
def verifying() -> Iterator[list[str]]:
    """Compare each launch inside with `expected`, and return the names of the kernels that passed.

    Raises:
        KernelError: inside, for a wrong result.
    """
    passed: list[str] = []
    before, launch.verified = launch.verified, passed
    try:
        yield passed
    finally:
        launch.verified = before


def checked_by(
    truth_of: Callable[..., expected.Expected],
    reader: Callable[..., dict[str, Tensor]] | None = None,
    *,
    adds: bool = False,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a launcher compare its results inside of :func:`verifying`.

    Args:
        truth_of: returns the truth, from the launcher's arguments.
        reader: returns the results, from the same arguments after the launch; None: they are what the launcher returns.
        adds: whether the launcher adds to what is in its memory.
    """

    def decorate(launcher: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(launcher)
        def start(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            if launch.verified is None:
                return launcher(*args, **kwargs)
            passed, launch.verified = launch.verified, None
            try:
                arguments = signature(launcher).bind(*args, **kwargs).arguments
                returned = _verified(launcher, truth_of, reader, arguments, adds=adds)
            finally:
                launch.verified = passed
            passed.append(launcher.__name__ + "_by_pointers" * launch.latest["by pointers"])
            return cast(_R, returned)

        return start

    return decorate


def _verified(
    launcher: Callable[..., Any],
    truth_of: Callable[..., expected.Expected],
    reader: Callable[..., dict[str, Tensor]] | None,
    arguments: dict[str, Any],
    *,
    adds: bool,
) -> Any:
    """Return what a launcher returns, and write what it writes, if all of it is right."""
    memory, guarded, originals = _Memory(), dict(arguments), dict(arguments)
    tile = guarded["tile"]
    features = tile.features if isinstance(tile, NestedTile | TokenTile) else tile
    around = replace(features, x=_surrounded(features.x), y=_surrounded(features.y))
    guarded["tile"] = around if tile is features else replace(tile, features=around)
    written = [name for name in ("out", "winners") if guarded.get(name) is not None]
    for name in written:
        result = guarded[name]
        if result.dim() == 2 and result.stride(0) < result.stride(1):  # by columns: another form of a kernel
            beside = _BESIDE * len(result)
            guarded[name] = memory.empty(features.x, result.shape[::-1], result.dtype, beside).T
        else:
            guarded[name] = memory.empty(features.x, result.shape, result.dtype)
        if adds:
            arguments[name] = arguments[name].clone(memory_format=torch.contiguous_format)
            arguments[name].view(-1)[::_EARLIER] += 1.0
            guarded[name].copy_(arguments[name])
    launch.memory = memory.empty
    try:
        returned = launcher(**guarded)
    finally:
        launch.memory = None
    truth = truth_of(**arguments)
    if adds:
        results = dict.fromkeys(truth, guarded["out"])
    elif reader is not None:
        results = reader(**{**arguments, **{name: guarded[name] for name in written}})
    else:
        results = _named(returned, truth, guarded[written[0]] if written else None)
    for name, (true, error) in truth.items():
        _compare(f"{launcher.__name__}, {name}", results[name], true, error)
    if not memory.is_left_alone():
        raise KernelError(f"{launcher.__name__} writes beside its results")
    for name in written:
        originals[name].copy_(guarded[name])
    return returned


def _named(returned: Any, truth: expected.Expected, written: Tensor | None) -> dict[str, Tensor]:
    """Return results by the names of the true ones."""
    results: dict[str, Tensor] = {} if written is None else {"dS": written}
    if isinstance(returned, tuple) and isinstance(returned[0], dict):
        for side, side_results in zip(("rows", "columns"), returned, strict=True):
            results |= {f"{side}: {name}": x for name, x in side_results.items()}
        return results
    rest = [x for x in (returned if isinstance(returned, tuple) else (returned,)) if x is not None]
    names = [name for name in truth if name != "dS"]
    return results | dict(zip(names, rest, strict=True))


def _compare(name: str, result: Tensor, true: Tensor, error: Tensor) -> None:
    """Raise KernelError unless every entry is right."""
    rounding = _ROUNDING.get(result.dtype, 0.0) * (2 if launch.interpreted() else 1)  # which truncates
    allowed = rounding * true.abs() + error + _TINY.get(result.dtype, 1e-30)
    excess = ((result.double() - true).abs() / allowed).nan_to_num(nan=float("inf"))
    count = int((excess > 1).sum())
    if not count:
        return
    worst = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst, device="cpu"), true.shape))
    raise KernelError(
        f"{name}: {count} of {true.numel()} entries are wrong; the worst, at {place}, is {result[place].item():.7g} "
        f"instead of {true[place].item():.7g}: its error may be {allowed[place].item():.3g}, "
        f"and is {excess[place].item():.3g} times that"
    )


def _surrounded(x: Tensor) -> Tensor:
    """Return a copy of rows with NaN before, after and beside them."""
    rows, dim = x.shape
    around = x.new_full((rows + 2, dim + _AROUND), float("nan"))
    around[1 : rows + 1, :dim] = x
    return around[1 : rows + 1, :dim]


def check_rows(x: Tensor, y: Tensor) -> None:
    """Compare the kernels that pass over rows with float64, on some features, (n, d) and (m, d).

    Raises:
        KernelError: for a wrong result.
    """
    memory, few = _Memory(), min(len(x), len(y))
    seeded = torch.Generator().manual_seed(len(x))
    product, grads, sums = (
        torch.rand(shape, generator=seeded, device="cpu").to(x.device) + 0.5 for shape in (x.shape, len(x), len(x))
    )
    grads, sums, unit = grads.double(), sums.double(), torch.tensor(0.25, device=x.device)
    backward = torch.arange(len(x), device=x.device).flip(0)  # an index
    launch.memory = memory.empty
    try:
        numbers = [rows.row_numbers(_surrounded(x), _surrounded(y), (unit,) * scalars) for scalars in range(3)]
        weights = rows.side_weights((grads, sums), (grads[:few], sums[:few]), 3.0)
        scaling, cosines = launch.numbers_of(14.3, 2.0, x.device), product[:few, 0] - 0.9
        pairs = [(inputs, cols) for cols in (None, grads[:few]) for inputs in [(sums[:few], cols, cosines, scaling)]]
        losses = [rows.pair_losses(*inputs) for inputs, _ in pairs]
        slopes = [rows.pair_weights(grads[:few], *inputs, 3.0) for inputs, _ in pairs]
        norms = numbers[0].norms[: len(x)].clone()
        gradients = {
            form: rows.row_gradient(
                product.clone(),
                _surrounded(x.flip(0) if form.placed else x),
                (_surrounded(y[:few]), grads[:few], 2.0) if form.paired else None,
                norms if form.normed else None,
                unit if form.in_units else None,
                2 * unit if form.loaded else 0.5,
                x.dtype if form.rounded else torch.float32,
                index=backward if form.placed else None,
                divided=form.divided,
                in_place=form.placed,
            )
            for form in _OF_ROWS_FORMS
        }
    finally:
        launch.memory = None
    a, b = x.double(), y.double()
    row_norms = torch.cat([a.norm(dim=1), b.norm(dim=1)])
    inner, sizes = (a[:few] * b[:few]).sum(1), (a[:few] * b[:few]).abs().sum(1)
    divisors = row_norms[: len(x), None].clamp(min=EPS)
    z = a / divisors
    compared: list[tuple[str, Tensor | None, Tensor, Tensor]] = []
    for computed in numbers:
        scalars = [unit.double()] * (len(computed.extremes) - 3)
        extremes = torch.stack([a.norm(dim=1).max(), b.norm(dim=1).max(), -inner.min(), *scalars])
        compared += [
            ("products", computed.products, inner, sizes),
            ("norms", computed.norms, row_norms, row_norms),
            ("extremes", computed.extremes, extremes, extremes.abs() + sizes.max()),
        ]
    compared += [
        ("weights of rows", weights[0], 3 * grads / sums, 3 * grads / sums),
        ("weights of columns", weights[1], 3 * grads[:few] / sums[:few], 3 * grads[:few] / sums[:few]),
        ("largest gradients", weights[2].amax(1), torch.stack([3 * grads.max(), 3 * grads[:few].max()]), 3 * grads[:2]),
    ]
    scale, shift = scaling.double()
    positive = (cosines.double() * scale - shift).exp2()
    for (_, cols), loss, (by_row, by_col, terms, largest) in zip(pairs, losses, slopes, strict=True):
        sides = [sums[:few]] if cols is None else [sums[:few], cols]
        slope = 3 * grads[:few] / len(sides)
        parts = torch.stack([slope * side / (side + positive) for side in sides])
        compared += [
            ("losses of pairs", loss, torch.stack([(side / positive).log1p() for side in sides]).mean(0), grads[:few]),
            ("terms of pairs", terms, -parts.sum(0), parts.sum(0)),
            ("largest of pairs", largest.amax(1).sum(), parts.amax(1).sum(), parts.sum()),
        ]
        for made_weights, side in zip((by_row, by_col), sides, strict=False):
            compared.append(("weights of pairs", made_weights, slope / (side + positive), slope / (side + positive)))
    for form, (dx, shares) in gradients.items():
        grad = product.double() * (0.25 if form.in_units else 1.0)
        size = grad.clone()
        if form.paired:
            grad[:few] += 2 * grads[:few, None] * b[:few]
            size[:few] += 2 * grads[:few, None] * b[:few].abs()
        if form.normed and not form.divided:
            grad, size = grad / divisors, size / divisors
        share = (a * grad).sum()
        if form.normed:
            grad, size = grad - z * (z * grad).sum(1, keepdim=True), size + size.norm(dim=1, keepdim=True)
        compared += [
            (f"dX, {form}", dx, 0.5 * grad, size),
            (f"<X, dX>, {form}", shares.sum(), share, (a.abs() * size).sum() + share.abs()),
        ]
    for name, result, true, terms in compared:
        assert result is not None
        _compare(f"rows, {name}", result, true, _OF_ROWS * terms)
    if not memory.is_left_alone():
        raise KernelError("a kernel of rows writes beside its results")


def check_angles(x: Tensor, centers: Tensor, index: Tensor | None = None) -> None:
    """Compare the kernels of angles with float64, on some rows, (n, d) and (m, d), n <= m, of which none is short.

    The index, (m,), names the rows of the centers; None: all, as they are. This is another form of the kernels.

    Raises:
        KernelError: for a wrong result.
    """
    memory, n = _Memory(), len(x)
    places = torch.arange(2 * n, device=x.device) % len(centers)
    targets = places.view(n, 2).clone()
    targets[0], targets[1:3, 1] = -1, -1  # on other ranks
    grads = places.view(n, 2).double() / n - 0.7
    launch.memory = memory.empty
    try:
        inputs = _surrounded(x), _surrounded(centers), targets, (True, True), index
        lengths, *chords = angles.target_chords(*inputs)
        angle_grads, all_grads = (
            angles.target_gradients(*inputs, chords=chords, grads=(grads, by_lengths), wanted=(True, True))
            for by_lengths in (None, 2 * grads)
        )
    finally:
        launch.memory = None
    theta, here = 2 * torch.atan2(*chords), (targets >= 0)[..., None]
    a, b = x.double()[:, None], (centers if index is None else centers[index]).double()[targets.clamp(min=0)]
    u, v = a / a.norm(dim=2, keepdim=True), b / b.norm(dim=2, keepdim=True)
    cosine = (u * v).sum(2, keepdim=True)
    true = torch.where(here, 2 * torch.atan2((u - v).norm(dim=2, keepdim=True), (u + v).norm(dim=2, keepdim=True)), 0.0)
    away = here & (
        true.sin() > angles.SAME * torch.finfo(torch.float64).eps
    )  # in one dimension rows are equal or opposite
    slope = torch.where(away, -grads[..., None] / true.sin().where(away, 1.0), 0.0)
    by_x = (slope * (v - cosine * u) / a.norm(dim=2, keepdim=True)).sum(1)
    by_w = slope * (u - cosine * v) / b.norm(dim=2, keepdim=True)
    by_lengths = torch.where(here, 2 * grads[..., None] * v, 0.0)
    made: list[tuple[str, Tensor, Tensor, float]] = []
    for (x_grad, pair_grads, pair_targets), further in (
        (angle_grads, torch.zeros_like(by_w)),
        (all_grads, by_lengths),
    ):
        assert x_grad is not None
        assert pair_grads is not None
        assert pair_targets is not None
        written = pair_targets.view_as(targets)
        if not bool(((written == targets) | (targets < 0) & (written >= 0) & (written < len(centers))).all()):
            raise KernelError("target_gradients writes wrong targets")
        made += [("dX", x_grad, by_x, 1e-6), ("dW", pair_grads.view(n, 2, -1), by_w + further, 1e-6)]
    for name, result, expected_one, error in (
        ("angles", theta, true[..., 0], 1e-10),
        ("lengths", lengths, torch.where(here, b.norm(dim=2, keepdim=True), 0.0)[..., 0], 1e-10),
        *made,
    ):
        _compare(f"angles, {name}", result, expected_one, error * (1 + expected_one.abs()))
    if not memory.is_left_alone():
        raise KernelError("a kernel of angles writes beside its results")


tile_sums = checked_by(expected.tile_sums)(softmax.tile_sums)
tile_gradient = checked_by(expected.tile_gradient)(softmax.tile_gradient)
tile_sigmoid = checked_by(expected.tile_sigmoid)(sigmoid.tile_sigmoid)
nested_sums = checked_by(expected.nested_sums)(nested.nested_sums)
nested_gradient = checked_by(expected.nested_gradient)(nested.nested_gradient)
token_maxima = checked_by(expected.token_maxima, expected.found_maxima)(tokens.token_maxima)
token_sums = checked_by(expected.token_sums, adds=True)(tokens.token_sums)
query_gradient = checked_by(expected.query_gradient, adds=True)(tokens.query_gradient)
document_gradient = checked_by(expected.document_gradient, adds=True)(tokens.document_gradient)
