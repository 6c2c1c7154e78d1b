"""The tensors of one call, sorted by the side that they belong to, and checked on the rank that has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._base.checks import check_features, has_feature_dtype, is_dense
from .._base.settings import check_number, shown
from ..contract import Inputs
from ..tokens import Packed, Tokens, packed
from .row_data import INDEX, PARTNER, SEPARATOR
from .similarity import LATE, ONE

NOTHING: Mapping[str, Any] = MappingProxyType({})
_RESERVED = {INDEX: "it is the number of the row", PARTNER: "it is the similarity with the partner"}


@dataclass(frozen=True)
class Arguments:
    """The arguments of one call.

    Args:
        x: (b, d), the features of all similarities side by side.
        y: (n, d), likewise; None: the rows of x are the columns, too.
        candidates: (k, d), own candidates of all rows one after the other, or None.
        widths: columns of each similarity, by name.
        x_data, y_data, candidate_data: vectors by name.
        owners: (k,), the local row of each own candidate; empty without any.
        parameters: numbers and tensors by name.
        x_lengths, y_lengths: the number of vectors of each row, in late interaction; else None. x and y then have a row
            for each vector.
        constant: the names of similarities whose features have no gradient on this rank.
    """

    x: Any
    y: Any
    candidates: Any
    widths: dict[str, int]
    x_data: dict[str, Tensor]
    y_data: dict[str, Tensor]
    candidate_data: dict[str, Tensor]
    owners: Tensor
    parameters: dict[str, Any]
    x_lengths: tuple[int, ...] | None = None
    y_lengths: tuple[int, ...] | None = None
    constant: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        kinds: Mapping[str, str],
        x: Any,
        y: Any = None,
        *,
        x_data: Any = NOTHING,
        y_data: Any = NOTHING,
        candidates: Any = None,
        candidate_data: Any = NOTHING,
        candidate_offsets: Any = None,
        parameters: Any = NOTHING,
    ) -> Arguments:
        """Return the arguments, by the names of those of a call.

        Raises:
            ValueError: for an argument of the wrong kind; shapes and dtypes of features and data are checked later.
        """
        x_data, y_data = _vectors("x_data", x_data), _vectors("y_data", y_data)
        candidate_data = _vectors("candidate_data", candidate_data)
        x_lengths = y_lengths = None
        if kinds.get(ONE) in LATE:
            if candidates is not None:
                raise ValueError(
                    "candidates must be left out with similarity='max_sim'; pass own candidates as rows of y with the "
                    "index of their row as data, and compare it in `where`"
                )
            if y is None:
                raise ValueError("y must be given with similarity='max_sim', which is not symmetric")
            (x, x_lengths), (y, y_lengths) = _packed("x", x), _packed("y", y)
        features, widths = _side_by_side("x", x, kinds)
        columns = None
        if y is not None:
            columns, y_widths = _side_by_side("y", y, kinds)
            if y_widths != widths and ONE not in kinds:
                raise ValueError(f"x and y must have the same embedding sizes, got {widths} and {y_widths}")
        elif y_data:
            raise ValueError("y_data must be left out where y is: the rows of x are the columns, with x_data")
        owners, flat = torch.zeros(0, dtype=torch.int64, device="cpu"), None
        if candidates is not None:
            flat, owners, candidate_data = _candidates(candidates, candidate_offsets, candidate_data, kinds, features)
        elif candidate_data or candidate_offsets is not None:
            raise ValueError(
                "candidate_data and candidate_offsets need candidates=, the features of each row's own candidates"
            )
        numbers = x_data, y_data, candidate_data, _parameters(parameters)
        x_data, y_data, candidate_data, p = [_on_device_of(features, part) for part in numbers]
        constant = _constant(kinds, (x, y, candidates))
        return cls(
            features, columns, flat, widths, x_data, y_data, candidate_data, owners, p, x_lengths, y_lengths, constant
        )

    @property
    def signature(self) -> list[Any]:
        """Names, dtypes and shapes of everything that functions read, and plain numbers, without the number of rows."""
        all_data = (self.x_data, self.y_data, self.candidate_data)
        dtypes = [[(name, str(x.dtype)) for name, x in numbers.items()] if numbers else [] for numbers in all_data]
        shapes = [(name, tuple(x.shape) if isinstance(x, Tensor) else x) for name, x in self.parameters.items()]
        return [dtypes, shapes, self.y is None, self.candidates is None, str(self.x.dtype), str(self.x.device)]

    @property
    def learned(self) -> list[str]:
        """Names of the tensors with a gradient."""
        each = {name: value if isinstance(value, dict) else {"": value} for name, value in vars(self).items()}
        tensors = [(name, key, x) for name, value in each.items() for key, x in value.items() if isinstance(x, Tensor)]
        return [f"{name}.{key}" for name, key, x in tensors if x.requires_grad]

    def inputs(self, weights: Tensor | None, *, matching: bool = False) -> Inputs:
        """Return everything on which ranks have to agree, under the names of the caller's arguments.

        With `matching`, a bound of the products of partners is found.
        """
        features = {"x": self.x}
        if self.y is not None:
            features["y"] = self.y
        if self.candidates is not None:
            features["candidates"] = self.candidates
        sides = (
            ("x_data", "x", self.x_data),
            ("y_data", "y", self.y_data),
            ("candidate_data", "candidates", self.candidate_data),
        )
        data = {f"{label}[{name!r}]": (x, side) for label, side, numbers in sides for name, x in numbers.items()}
        return Inputs(
            features=features,
            weights=(weights, "x"),
            matching=("x", "y") if matching and self.y is not None else None,
            data=data,
            parameters={f"parameters[{name!r}]": value for name, value in self.parameters.items()},
            items={name: len(x) for name, x in (("x", self.x_lengths), ("y", self.y_lengths)) if x is not None},
        )


def _packed(name: str, x: Any) -> Packed:
    """Return the vectors of items that the caller has padded or packed."""
    return packed(name, x if isinstance(x, Tokens) else Tokens(x))


def _vectors(name: str, data: Any) -> dict[str, Tensor]:
    if data is NOTHING:
        return {}
    if not isinstance(data, Mapping):
        raise ValueError(f"{name} must be a mapping such as {{'label': labels}}, got {shown(data)}")
    for key in data:
        _check_name(name, key)
        if key in _RESERVED:
            raise ValueError(f"{name} must not have the name {key!r}: {_RESERVED[key]}; choose another")
        if not is_dense(data[key]) or (data[key].dim() != 1 and name != "candidate_data"):
            fix = "; torch.as_tensor(...) makes one"
            got = tuple(data[key].shape) if is_dense(data[key]) else shown(data[key]) + fix
            raise ValueError(f"{name}[{key!r}] must be a tensor with a number for each row, (rows,), got {got}")
    return dict(data)


def _check_name(label: str, name: object) -> None:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_") or SEPARATOR in name:
        raise ValueError(f"{label} must have names like 'label', which functions read as attributes; got {shown(name)}")


def _side_by_side(name: str, x: Any, kinds: Mapping[str, str]) -> tuple[Any, dict[str, int]]:
    """Return the features of all similarities in one matrix, and the columns of each."""
    if ONE in kinds:
        if isinstance(x, Mapping):
            raise ValueError(
                f"{name} must be a tensor, because similarity={kinds[ONE]!r} is one; for several pass a mapping as "
                "similarity, too"
            )
        return x, {ONE: x.shape[1] if is_dense(x) and x.dim() == 2 else 0}
    if not isinstance(x, Mapping) or set(x) != set(kinds):
        got = sorted(map(str, x)) if isinstance(x, Mapping) else shown(x)
        raise ValueError(f"{name} must be a mapping with the names of similarity, {sorted(kinds)}, got {got}")
    parts = [x[key] for key in kinds]
    for key, part in zip(kinds, parts, strict=True):
        if not is_dense(part) or not has_feature_dtype(part) or part.dim() != 2 or not part.shape[1]:
            got = f"{tuple(part.shape)}, {part.dtype}" if is_dense(part) else shown(part)
            raise ValueError(f"{name}[{key!r}] must be a floating-point tensor (rows, embedding size), got {got}")
        if len(part) != len(parts[0]) or part.dtype != parts[0].dtype or part.device != parts[0].device:
            raise ValueError(f"all of {name} must have the same number of rows, dtype and device")
    return torch.cat(parts, dim=1), {key: part.shape[1] for key, part in zip(kinds, parts, strict=True)}


def _constant(kinds: Mapping[str, str], features: tuple[Any, ...]) -> frozenset[str]:
    """Return the names of several similarities whose features have no gradient."""
    if ONE in kinds:
        return frozenset()
    parts = [(name, x[name]) for x in features if x is not None for name in kinds]
    return frozenset(kinds) - {name for name, part in parts if part.requires_grad}


def _candidates(
    candidates: Any, offsets: Any, data: dict[str, Tensor], kinds: Mapping[str, str], x: Any
) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """Return own candidates in one list, (k, d), their rows, (k,), and their data, (k,) each."""
    check_features("x", x)  # its number of rows is read below, before the ranks agree on it
    rows = len(x)
    if isinstance(candidates, Mapping) != (ONE not in kinds) or (ONE not in kinds and set(candidates) != set(kinds)):
        raise ValueError(
            f"candidates must be a tensor, or a mapping with the names of similarity like x, got {shown(candidates)}"
        )
    each = candidates if isinstance(candidates, Mapping) else {ONE: candidates}
    first = next(iter(each.values()))
    if not is_dense(first):
        raise ValueError(
            f"candidates must be a tensor (rows, h, embedding size), or (n, embedding size) with candidate_offsets, "
            f"got {shown(first)}"
        )
    if offsets is None:
        if first.dim() != 3 or len(first) != rows:
            raise ValueError(
                f"candidates must have shape (rows, h, embedding size) with {rows} rows, got {tuple(first.shape)}; for "
                "different numbers of candidates pass (n, embedding size) and candidate_offsets"
            )
        count = first.shape[1]
        owners = torch.arange(rows, device=first.device).repeat_interleave(count)
        for name, value in data.items():
            if tuple(value.shape) != (rows, count):
                raise ValueError(
                    f"candidate_data[{name!r}] must have shape {(rows, count)} like candidates, got "
                    f"{tuple(value.shape)}"
                )
        data = {name: value.flatten() for name, value in data.items()}
        flat = {name: part.flatten(0, 1) for name, part in each.items()}
    else:
        owners = _owners(offsets, rows, len(first))
        flat = dict(each)
    return (
        _side_by_side("candidates", flat if isinstance(candidates, Mapping) else flat[ONE], kinds)[0],
        owners.to(first.device),
        data,
    )


def _owners(offsets: Any, rows: int, count: int) -> Tensor:
    good = is_dense(offsets) and offsets.dtype in (torch.int32, torch.int64) and tuple(offsets.shape) == (rows + 1,)
    if good:
        ends = offsets.tolist()
        good = ends[0] == 0 and ends[-1] == count and all(a <= b for a, b in pairwise(ends))
    if not good:
        raise ValueError(
            f"candidate_offsets must be {rows + 1} integers that rise from 0 to {count}: row i's candidates are those "
            f"from candidate_offsets[i] up to candidate_offsets[i + 1]; got {_offsets_error(offsets)}"
        )
    return torch.arange(rows, device=offsets.device).repeat_interleave(offsets.diff())


def _offsets_error(offsets: object) -> str:
    """Return the text of wrong offsets."""
    if not is_dense(offsets):
        return shown(offsets)
    some = str(offsets.tolist()) if offsets.dim() == 1 and len(offsets) <= 8 else f"shape {tuple(offsets.shape)}"
    ends = f", from {offsets[0]} to {offsets[-1]}" if offsets.dim() == 1 and len(offsets) > 8 else ""
    return f"{some}{ends}, {offsets.dtype}; of counts pass torch.nn.functional.pad(counts.cumsum(0), (1, 0))"


def check_parameters(parameters: Any) -> None:
    """Raise ValueError unless parameters are numbers, tensors or modules by name; what modules return is not known."""
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters must be a mapping such as {{'scale': 20.0}}, got {shown(parameters)}")
    for name, value in parameters.items():
        _check_name("parameters", name)
        if not isinstance(value, Tensor | nn.Module):
            check_number(f"parameters[{name!r}]", value, or_=", a tensor or a module such as wb.Scale")


def _parameters(parameters: Any) -> dict[str, Any]:
    """Return the parameters of a call: numbers and tensors."""
    check_parameters(parameters)
    returned = {name: value() for name, value in parameters.items() if isinstance(value, nn.Module)}
    if returned:
        check_parameters(returned)
    values = {**parameters, **returned}
    for name, value in values.items():
        if not is_dense(value) and not isinstance(value, int | float):
            raise ValueError(f"parameters[{name!r}] must be a number or a dense tensor with data, got {shown(value)}")
    return values


def _on_device_of(x: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """Return numbers with their tensors on the device of the features x; if these are no tensor they stay."""
    if not isinstance(x, Tensor) or not numbers:
        return numbers
    return {name: number.to(x.device) if isinstance(number, Tensor) else number for name, number in numbers.items()}
