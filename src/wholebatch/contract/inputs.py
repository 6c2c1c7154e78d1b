"""A loss's declaration of the tensors and scalars of one call, and their checks on the rank that has them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._base.checks import (
    check_alike,
    check_data,
    check_features,
    check_ids,
    check_norm,
    check_not_negative,
    check_one,
    check_positive,
    check_value,
    check_weights,
    norm_bound,
)
from .._base.precision import paired_products, wide_dtype
from .._base.settings import LARGEST, SMALLEST_DIVISOR, check_label
from ..kernels import READABLE, RowNumbers, row_numbers

MIN_PAIR_PRODUCT = "smallest product of a pair"
SUM_OF_WEIGHTS, SMALLEST_WEIGHT, SMALLEST_LABEL = "sum of weights", "smallest weight", "smallest label"


@dataclass(eq=False)
class Inputs:
    """The tensors and scalars of one call.

    Attributes:
        given_features, given_scalars: those of the call: all but the optional ones that are None.
        given_ids: the ids of the call, each with the name of its features.
        first: the name and the value of the first features, to which all others are compared.
    """

    # features: matrices with as many columns, of one dtype and device; the first has the rows of the batch
    features: Mapping[str, Tensor | None]
    # scalars: numbers, or tensors of shape () or [1], that are equal on all ranks
    scalars: Mapping[str, Tensor | float | None] = field(default_factory=dict)
    # ids: integer vectors or None, each with the name of the features whose rows it numbers
    ids: Mapping[str, tuple[Tensor | None, str]] = field(default_factory=dict)
    # weights: of examples, or None, with the name of the features whose rows they weigh
    weights: tuple[Tensor | None, str] = (None, "")
    optional: Sequence[str] = ()  # names of features and scalars that may be None
    required: Sequence[str] = ()  # names of ids that may not be None
    # measured: names of features whose largest norm is among the numbers that the loss reads back itself
    measured: Sequence[str] = ()
    labels: str = ""  # the name of ids that may not be negative
    positive: Sequence[str] = ()  # names of scalars that must be positive
    paired: tuple[str, str] | None = None  # names of two features with the same number of rows
    # matching: names of two features whose rows i are positives of each other, for every i that both have
    matching: tuple[str, str] | None = None
    normalized: bool = False  # whether norms bound no logits: the loss divides rows by them, or has no logits
    # any_scale: whether a scale may rise to 102 between two calls with unit rows, without a sum that underflows: each
    # sum is that of a matching pair, too, or there are no sums
    any_scale: bool = False
    # data: vectors of any dtype, each with the name of the features whose rows have these numbers
    data: Mapping[str, tuple[Tensor, str]] = field(default_factory=dict)
    # parameters: numbers, or tensors of any shape, that are equal on all ranks
    parameters: Mapping[str, Tensor | float] = field(default_factory=dict)
    # items: for features whose rows are vectors of items, such as the tokens of documents, the number of items: these
    # are the rows of S
    items: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        optional = self.optional
        self.given_features: dict[str, Any] = {
            name: x for name, x in self.features.items() if x is not None or name not in optional
        }
        self.given_scalars: dict[str, Any] = {
            name: x for name, x in self.scalars.items() if x is not None or name not in optional
        }
        self.given_ids: dict[str, tuple[Any, str]] = {
            name: (x, side) for name, (x, side) in self.ids.items() if x is not None or name in self.required
        }
        self.first: tuple[str, Any] = next(iter(self.given_features.items()))

    @property
    def device(self) -> torch.device | None:
        """The device of the features; None if they are no tensors."""
        x = self.first[1]
        return x.device if isinstance(x, Tensor) else None

    def form(self) -> Hashable:
        """Return what the checks of these arguments depend on but for the values of numbers."""
        items = [(name, form_of_tensor(x)) for name, x in self.features.items()]
        items += [(name, form_of_tensor(x)) for name, x in self.scalars.items()]
        if self.ids:
            items += [(name, form_of_tensor(x)) for name, (x, _) in self.ids.items()]
        if self.weights[0] is not None:
            items.append(("weights", form_of_tensor(self.weights[0])))
        if self.data or self.parameters or self.items:
            items += [(name, form_of_tensor(x)) for name, (x, _) in self.data.items()]
            items += [(name, form_of_tensor(x)) for name, x in self.parameters.items()]
            items += self.items.items()
        return tuple(items)

    @property
    def names(self) -> list[str]:
        """The names of all given arguments, which must be the same on all ranks."""
        weights = [] if self.weights[0] is None else ["weights"]
        return [*self.given_scalars, *self.given_features, *self.given_ids, *weights, *self.data, *self.parameters]

    @property
    def differentiable(self) -> dict[str, Any]:
        """All arguments that may need a gradient, given or not."""
        data = {name: x for name, (x, _) in self.data.items() if x.is_floating_point()}
        return {**self.scalars, **self.features, "weights": self.weights[0], **data, **self.parameters}

    @cached_property
    def compared(self) -> dict[str, Any]:
        """The numbers that must be equal on all ranks: scalars, and for each parameter itself or two norms."""
        compared = dict(self.given_scalars)
        for name, x in self.parameters.items():
            if not isinstance(x, Tensor) or x.numel() == 1:
                compared[name] = x if not isinstance(x, Tensor) else x.detach().reshape(())
                continue
            flat = x.detach().reshape(-1).to(wide_dtype(x.device))
            ramp = torch.linspace(1, 2, len(flat), dtype=flat.dtype, device=flat.device)
            compared[f"the norm of {name}"] = torch.linalg.vector_norm(flat)
            compared[f"a projection of {name}"] = torch.linalg.vector_norm(flat + ramp)
        return compared

    @property
    def counts(self) -> dict[str, int]:
        """The number of rows of S that each of the features stands for."""
        return {name: self.items.get(name, len(x)) for name, x in self.given_features.items()}

    def check_features(self) -> None:
        """Raise ValueError unless features are matrices that fit together, as far as shapes and dtypes tell."""
        for name, x in self.given_features.items():
            check_features(name, x)
        first_name, first = self.first
        for name, x in self.given_features.items():
            check_alike(first_name, first, name, x, rows=(first_name, name) == self.paired)

    def check_rest(self) -> None:
        """Raise ValueError unless ids, weights and scalars have the right shapes and types."""
        counts = self.counts
        for name, (x, side) in self.given_ids.items():
            check_ids(name, x, side, counts[side])
        weights, side = self.weights
        if weights is not None:
            check_weights("weights", weights, side, counts[side])
        for name, value in self.given_scalars.items():
            check_one(name, value)
        for name, (x, side) in self.data.items():
            check_data(name, x, side, counts[side])

    def numbers(self) -> dict[str, Tensor | float]:
        """Return the numbers that the checks of values need, shape () or [1] on the device, or checked floats."""
        numbers: dict[str, Tensor | float] = {
            norm_of(name): norm_bound(x) for name, x in self.given_features.items() if name not in self.measured
        }
        for name, value in self.compared.items():
            numbers[name] = value if isinstance(value, Tensor) else self._check_scalar(name, value)
        if self.weights[0] is not None:
            numbers |= self._weight_numbers(self.weights[0])
        if self.labels:
            ids = self.given_ids[self.labels][0].to(self.device, wide_dtype(self.first[1].device))
            numbers[SMALLEST_LABEL] = ids.amin() if len(ids) else ids.sum()
        if self.matching is not None:
            x, y = (self.given_features[name] for name in self.matching)
            numbers[MIN_PAIR_PRODUCT] = _smallest_product(x, y)
        return numbers

    @staticmethod
    def _weight_numbers(weights: Tensor) -> dict[str, Tensor]:
        weights = weights.detach().to(wide_dtype(weights.device))
        smallest = weights.amin() if len(weights) else weights.sum()
        return {SUM_OF_WEIGHTS: weights.sum(), SMALLEST_WEIGHT: smallest}

    def may_be_fused(self) -> bool:
        """Return whether one kernel computes the numbers of these inputs: those of two features, and scalars."""
        features, scalars = [*self.given_features.values()], [*self.given_scalars.values()]
        return (
            len(features) == 2
            and len(scalars) <= 2
            and not self.parameters
            and features[0].dtype in READABLE
            and all(x.device == features[0].device for x in scalars if isinstance(x, Tensor))
        )

    def fused_numbers(self, *, read: bool) -> tuple[dict[str, Tensor | float], RowNumbers]:
        """Return the same as `numbers`, by one kernel, and the numbers of each row; the host reads now, or later."""
        x, y = self.given_features.values()
        pair_numbers = row_numbers(x, y, [x for x in self.given_scalars.values() if isinstance(x, Tensor)])
        extremes: Sequence[Any] = pair_numbers.extremes.tolist() if read else pair_numbers.extremes.unbind()
        numbers: dict[str, Tensor | float] = {norm_of(name): extremes[i] for i, name in enumerate(self.given_features)}
        scalars = iter(extremes[3:])
        for name, value in self.given_scalars.items():
            numbers[name] = next(scalars) if isinstance(value, Tensor) else self._check_scalar(name, value)
        if self.weights[0] is not None:
            numbers |= self._weight_numbers(self.weights[0])
        if self.matching is not None:
            numbers[MIN_PAIR_PRODUCT] = -extremes[2]
        return numbers, pair_numbers

    def accepts(self, columns: Mapping[str, Sequence[float]]) -> bool:
        """Return whether scalars and weights of all ranks are as `check_values` wants them; norms may be anything."""
        for name in self.compared:
            least = SMALLEST_DIVISOR if name in self.positive else -LARGEST
            if not (least <= min(columns[name]) and max(columns[name]) <= LARGEST):
                return False
        return min(*columns.get(SMALLEST_WEIGHT, [0]), *columns.get(SMALLEST_LABEL, [0])) >= 0

    def check_values(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Return the numbers that were read back, if all are valid; norms that have overflowed are computed again."""
        norms = {norm_of(name): check_norm(name, x, numbers[norm_of(name)]) for name, x in self.given_features.items()}
        scalars = {name: self._check_scalar(name, numbers[name]) for name in self.compared}
        check_label(int(numbers.get(SMALLEST_LABEL, 0)))
        if self.weights[0] is not None:
            check_not_negative("weights", self.weights[0], numbers[SMALLEST_WEIGHT], numbers[SUM_OF_WEIGHTS])
        return {**numbers, **norms, **scalars}

    def _check_scalar(self, name: str, value: float) -> float:
        number = float(check_value(name, value))
        return check_positive(name, number) if name in self.positive else number


@dataclass(eq=False)
class Checks:
    """The checks of one loss beside those of its :class:`Inputs`, on each rank."""

    # check: a function that checks settings and further arguments, and returns facts about them
    check: Callable[[], Mapping[str, Any]] = dict
    # read_back: a function that returns further numbers, on the device of shape (), by name. MIN_PAIR_PRODUCT replaces
    # that of `Inputs.matching`
    read_back: Callable[[], Mapping[str, Tensor | float]] = dict
    # derive: a function that checks these numbers, and returns facts about them; None: there are none. It depends on
    # the numbers alone: each rank calls it with the numbers of every rank. Only on the rank that has them may it read
    # tensors, for the message of an error
    derive: Callable[[Mapping[str, float]], Mapping[str, Any]] | None = None
    from_first: Sequence[str] = ()  # names of numbers to read back that all ranks take from rank 0, beside the scalars
    must_match: Sequence[str] = ()  # names of the facts that must be equal on all ranks
    # settings: all that `check` depends on beside the form of the inputs; None: it is called in each call
    settings: tuple[Hashable, ...] | None = None
    reads: str = ""  # why the host has to read values in each call, for checks="deferred"; "": it does not
    in_kernels: bool = field(default=False, init=False)  # whether kernels compute this call, for `read_back`

    @classmethod
    def of(cls, check: Callable[..., object], *, reads: str = "", **settings: Any) -> Checks:
        """Return the checks of settings that must be equal on all ranks; `check` takes them by their names."""

        def facts() -> dict[str, Any]:
            check(**settings)
            return {"settings": settings}

        return cls(facts, must_match=("settings",), settings=(*settings.values(),), reads=reads)


def form_of_tensor(x: Any) -> Hashable:
    """Return what checks of an argument depend on but for the values of numbers."""
    if not isinstance(x, Tensor):
        return x.__class__
    shape = None if x.is_nested else x.shape
    return x.__class__, shape, x.dtype, x.device, x.layout, x.requires_grad, x.is_inference()


def norm_of(name: str) -> str:
    return f"largest norm of {name}"


def _smallest_product(x: Tensor, y: Tensor) -> Tensor:
    """Return min_i x_i . y_i over the rows that both have, shape (); infinity without rows."""
    rows = min(x.shape[0], y.shape[0])
    products = paired_products(x, y) if x.shape == y.shape else paired_products(x[:rows], y[:rows])
    return products.amin() if rows else products.new_full((), torch.inf)
