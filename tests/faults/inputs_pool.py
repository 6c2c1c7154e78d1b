"""Values that few arguments accept: name -> a function that makes one."""

from __future__ import annotations

import enum
import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn


class NoTruth:
    """An object that has no truth value."""

    def __bool__(self) -> bool:
        raise ArithmeticError("this object is neither true nor false")


class NoEquality:
    """An object that cannot be compared."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        raise ArithmeticError("this object cannot be compared")


class NoRepresentation:
    """An object that cannot be shown."""

    def __repr__(self) -> str:
        raise ArithmeticError("this object cannot be shown")


class NoLength:
    """Something like a sequence, whose length raises."""

    def __len__(self) -> int:
        raise ArithmeticError("this object has no length")

    def __getitem__(self, at: int) -> int:
        raise ArithmeticError("this object has no items")


class Word(str):
    """A string of a derived class."""


class Level(enum.IntEnum):
    """An integer that is a member of an enumeration."""

    THREE = 3


def _function(*_args: Any, **_kwargs: Any) -> None:
    """Accept anything, return nothing."""


_PLAIN: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "false": lambda: False,
    "zero": lambda: 0,
    "one": lambda: 1,
    "three": lambda: 3,
    "minus_one": lambda: -1,
    "int_10^12": lambda: 10**12,
    "int_2^63": lambda: 2**63,
    "int_-2^63": lambda: -(2**63),
    "int_10^400": lambda: 10**400,
    "int_-10^400": lambda: -(10**400),
    "int_10^5000": lambda: 10**5000,
    "half": lambda: 0.5,
    "minus_half": lambda: -0.5,
    "two_and_a_half": lambda: 2.5,
    "two_point_zero": lambda: 2.0,
    "float_1e308": lambda: 1e308,
    "float_-1e308": lambda: -1e308,
    "float_1e-320": lambda: 1e-320,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "minus_inf": lambda: -math.inf,
    "complex": lambda: 1j,
    "empty_string": lambda: "",
    "no": lambda: "no",
    "number_string": lambda: "1",
    "nul_string": lambda: "a\x00b",
    "long_string": lambda: "x" * 5000,
    "word": lambda: Word("sum"),
    "enum": lambda: Level.THREE,
    "bytes": lambda: b"mean",
    "path": lambda: Path("no/such/folder"),
    "empty_list": lambda: [],
    "integers": lambda: [1, 2],
    "floats": lambda: [0.5, 0.9],
    "nans": lambda: (math.nan, math.nan),
    "nones": lambda: [None, None],
    "strings": lambda: ["a", "b"],
    "nested_list": lambda: [[1.0, 2.0], [3.0]],
    "empty_dict": lambda: {},
    "dict": lambda: {"a": 1},
    "set": lambda: {1, 2},
    "range": lambda: range(3),
    "generator": lambda: (n for n in (1, 2)),
    "slice": lambda: slice(0, 2),
    "ellipsis": lambda: ...,
    "object": object,
    "class": lambda: object,
    "module_class": lambda: nn.Linear,
    "function": lambda: _function,
    "exception": lambda: ValueError("an exception"),
    "python_module": lambda: math,
    "fraction": lambda: Fraction(1, 2),
    "decimal": lambda: Decimal("0.5"),
    "no_truth": NoTruth,
    "no_equality": NoEquality,
    "no_representation": NoRepresentation,
    "no_length": NoLength,
    "torch_float32": lambda: torch.float32,
    "torch_bool": lambda: torch.bool,
    "torch_complex64": lambda: torch.complex64,
    "torch_float8": lambda: torch.float8_e4m3fn,
    "cpu": lambda: torch.device("cpu"),
    "meta": lambda: torch.device("meta"),
    "generator_of_torch": torch.Generator,
    "linear": lambda: nn.Linear(3, 2),
    "optimizer": lambda: torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1),
}


def _numpy() -> dict[str, Callable[[], Any]]:
    try:
        import numpy as np
    except ImportError:
        return {}
    return {
        "np_float64": lambda: np.float64(0.5),
        "np_float32": lambda: np.float32(0.5),
        "np_int64": lambda: np.int64(3),
        "np_bool": lambda: np.bool_(True),
        "np_matrix": lambda: np.ones((4, 3), dtype=np.float32),
        "np_integers": lambda: np.arange(4),
        "np_objects": lambda: np.array([None, "a"], dtype=object),
    }


def _nested(layout: torch.layout) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(2, 3)], layout=layout)


def _quantized() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that quantized dtypes are deprecated
        return torch.quantize_per_tensor(torch.ones(4, 3), 0.1, 0, torch.quint8)


def _csr() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that this layout is in beta
        return torch.eye(4, 3).to_sparse_csr()


def _with(value: float, *shape: int) -> torch.Tensor:
    x = torch.ones(shape)
    x.view(-1)[0] = value
    return x


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(4, 3)


_TENSORS: dict[str, Callable[[], Any]] = {
    "t_scalar": lambda: torch.tensor(0.5),
    "t_scalar_nan": lambda: torch.tensor(math.nan),
    "t_scalar_inf": lambda: torch.tensor(math.inf),
    "t_scalar_negative": lambda: torch.tensor(-1.0),
    "t_scalar_int": lambda: torch.tensor(1),
    "t_scalar_bool": lambda: torch.tensor(True),
    "t_scalar_learned": lambda: nn.Parameter(torch.tensor(0.5)),
    "t_scalar_meta": lambda: torch.ones((), device="meta"),
    "t_one": lambda: torch.tensor([0.5]),
    "t_empty": lambda: torch.empty(0),
    "t_4": lambda: torch.ones(4),
    "t_4_nan": lambda: _with(math.nan, 4),
    "t_4_negative": lambda: -torch.ones(4),
    "t_4_zero": lambda: torch.zeros(4),
    "t_4_int": lambda: torch.tensor([0, 0, 1, 1]),
    "t_4_uint8": lambda: torch.tensor([0, 0, 1, 1], dtype=torch.uint8),
    "t_4_int8": lambda: torch.tensor([0, 0, 1, 1], dtype=torch.int8),
    "t_4_uint16": lambda: torch.tensor([0, 0, 1, 1], dtype=torch.uint16),
    "t_4_bool": lambda: torch.tensor([True, False, True, False]),
    "t_4_int_large": lambda: torch.full((4,), 2**62),
    "t_4_int_least": lambda: torch.full((4,), -(2**63)),
    "t_4_int_negative": lambda: torch.tensor([-5, -5, -7, -7]),
    "t_4_sparse": lambda: torch.tensor([0, 1, 0, 1]).to_sparse(),
    "t_4_meta": lambda: torch.ones(4, dtype=torch.int64, device="meta"),
    "t_4x3": lambda: torch.eye(4, 3) + 0.5,
    "t_4x3_double": lambda: torch.ones(4, 3, dtype=torch.float64),
    "t_4x3_half": lambda: torch.ones(4, 3, dtype=torch.float16),
    "t_4x3_bfloat16": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "t_4x3_float8": lambda: torch.ones(4, 3).to(torch.float8_e4m3fn),
    "t_4x3_int": lambda: torch.ones(4, 3, dtype=torch.int64),
    "t_4x3_bool": lambda: torch.ones(4, 3, dtype=torch.bool),
    "t_4x3_complex": lambda: torch.ones(4, 3, dtype=torch.complex64),
    "t_4x3_nan": lambda: _with(math.nan, 4, 3),
    "t_4x3_inf": lambda: _with(math.inf, 4, 3),
    "t_4x3_zero": lambda: torch.zeros(4, 3),
    "t_4x3_sparse": lambda: torch.eye(4, 3).to_sparse(),
    "t_4x3_csr": _csr,
    "t_4x3_meta": lambda: torch.ones(4, 3, device="meta"),
    "t_4x3_quantized": _quantized,
    "t_4x3_expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "t_4x3_learned": lambda: torch.ones(4, 3, requires_grad=True),
    "t_4x3_inference": _inference,
    "t_4x3_conjugate": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "t_nested": lambda: _nested(torch.strided),
    "t_jagged": lambda: _nested(torch.jagged),
    "t_0x3": lambda: torch.ones(0, 3),
    "t_4x0": lambda: torch.ones(4, 0),
    "t_5x3": lambda: torch.ones(5, 3),
    "t_4x5": lambda: torch.ones(4, 5),
    "t_4x2x3": lambda: torch.ones(4, 2, 3),
    "tensors": lambda: [torch.ones(4, 3), torch.ones(4, 3)],
    "np_like": lambda: torch.ones(4, 3).tolist(),
}

POOL: dict[str, Callable[[], Any]] = {**_PLAIN, **_numpy(), **_TENSORS}
