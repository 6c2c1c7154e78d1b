"""Preconditions, one function each; every message shows expected, got and the likely fix."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ._normalize import known_norms
from ._precision import accumulation_dtype, wide_dtype

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_features(name: str, x: object) -> None:
    """x is a floating-point matrix (rows, feature size)."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape (rows, feature size), got {type(x).__name__}")
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape (rows, feature size) with feature size >= 1, got {tuple(x.shape)}; "
            "a rank without rows passes shape (0, feature size)"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}; pass the encoder's output, not ids"
        )
    check_dense(name, x)


def check_dense(name: str, x: Tensor) -> None:
    """x has its entries in memory."""
    if x.layout is not torch.strided or x.device.type == "meta":
        raise ValueError(f"{name} must be a dense tensor with data, got layout {x.layout} on device {x.device}")


def on_host(numbers: Mapping[str, Tensor]) -> dict[str, float]:
    """Tensors of one element, as numbers. What lies on a GPU is waited for once, however many there are."""
    found: dict[str, float] = {}
    for device in {x.device for x in numbers.values()}:
        there = {name: x for name, x in numbers.items() if x.device == device}
        stacked = torch.stack([x.detach().reshape(()).to(wide_dtype(device)) for x in there.values()])
        found.update(zip(there, stacked.tolist(), strict=True))
    return found


def norm_bound(x: Tensor) -> Tensor:
    """The largest norm of x's rows, shape (); 0 without rows."""
    if not len(x):
        return x.new_zeros((), dtype=accumulation_dtype(x.dtype))
    return torch.linalg.vector_norm(x.detach(), dim=1, dtype=accumulation_dtype(x.dtype)).amax()


def check_norm(name: str, x: Tensor, largest: float) -> float:
    """x, whose rows have such a largest norm, has no entry that is NaN or infinite; returns the norm.

    Where squares have overflowed it is taken once more, and is infinite only if no float is that large.
    """
    if math.isfinite(largest):
        return largest
    check_finite(name, x)
    return known_norms(x).amax().item()


def largest_norm(name: str, x: Tensor) -> float:
    """The largest norm of x's rows, none of which has an entry that is NaN or infinite; 0 without rows."""
    return check_norm(name, x, norm_bound(x).item())


def check_finite(name: str, x: Tensor) -> None:
    """No entry of x is NaN or infinite."""
    if x.numel() and (x.is_floating_point() or x.is_complex()):
        largest = torch.linalg.vector_norm(x.detach(), ord=math.inf).item()
        if not math.isfinite(largest):
            raise ValueError(
                f"{name} must be finite, its largest absolute entry is {largest}; look for an overflow, a division "
                "by the norm of a zero vector, or a learning rate that is too high"
            )


def check_alike(name_x: str, x: Tensor, name_y: str, y: Tensor, *, rows: bool) -> None:
    """Two feature matrices have the same width, dtype and device, and with `rows` the same number of rows."""
    for what, ours, theirs, fix in (
        ("shape", tuple(x.shape), tuple(y.shape), "row i of one belongs to row i of the other")
        if rows
        else ("feature size", x.shape[1], y.shape[1], "each row of one meets each row of the other"),
        ("dtype", x.dtype, y.dtype, "cast one of them"),
        ("device", x.device, y.device, "move one of them"),
    ):
        if ours != theirs:
            raise ValueError(f"{name_x} and {name_y} must have the same {what}, got {ours} and {theirs}; {fix}")


def check_ids(name: str, ids: object, of: str, rows: int) -> None:
    """ids is one integer for each of the rows of the features `of`."""
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        fix = "cast with .long()" if isinstance(ids, Tensor) else f"pass torch.tensor({name})"
        raise ValueError(f"{name} must be a tensor of integers, one for each row of {of}, got {got}; {fix}")
    check_dense(name, ids)
    if ids.shape != (rows,):
        raise ValueError(
            f"{name} must have shape ({rows},), one integer for each row of {of}, got {tuple(ids.shape)}; of one-hot "
            "rows pass the argmax"
        )


def check_weights(name: str, weights: object, of: str, rows: int) -> None:
    """weights has one number for each of the rows of the features `of`."""
    if not isinstance(weights, Tensor) or weights.dtype not in _DTYPES:
        got = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise ValueError(f"{name} must be a floating-point tensor, one number for each row of {of}, got {got}")
    check_dense(name, weights)
    if weights.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},), one for each row of {of}, got {tuple(weights.shape)}")


def check_not_negative(name: str, weights: Tensor, least: float, total: float) -> float:
    """weights, of which these are the least and the sum, are finite and not negative; returns their sum."""
    if not math.isfinite(total):
        wrong = weights[~weights.isfinite()]
        raise ValueError(f"{name} must be finite, got {wrong[0].item() if len(wrong) else total}")
    if least < 0:
        raise ValueError(f"{name} must not be negative, got {least}; 0 leaves an example out")
    return total


def check_scalar(name: str, value: object) -> float:
    """value is a finite real number, or a floating-point tensor of one element (shape () or [1])."""
    check_one(name, value)
    return check_value(name, value.detach().item() if isinstance(value, Tensor) else float(value))  # type: ignore[arg-type]


def check_one(name: str, value: object) -> None:
    """value is a real number, or a floating-point tensor of one element."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > 1 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be a number or a floating-point tensor of shape () or [1], "
                f"got shape {tuple(value.shape)} and {value.dtype}"
            )
    elif not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name} must be a number or a tensor of one element, got {type(value).__name__}")


def check_value(name: str, number: float) -> float:
    """number is finite; returns it."""
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {number}; clamp it, and look at the learning rate")
    return number


def check_count(name: str, value: object, of: str) -> int:
    """value is a positive integer."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} must be a positive integer, {of}; got {value!r}")
    return value


def check_number(name: str, value: object) -> float:
    """value is a finite number, no tensor."""
    if isinstance(value, Tensor):
        raise ValueError(f"{name} must be a number, got a tensor; it is not learned")
    return check_scalar(name, value)


def check_temperature(name: str, value: object) -> float:
    """value is a scalar as for `check_scalar`, and positive."""
    return check_positive(name, check_scalar(name, value))


def check_positive(name: str, number: float) -> float:
    """number, a temperature, is positive; returns it."""
    if number <= 0:
        raise ValueError(f"{name} must be positive, got {number}; logits are similarities divided by it")
    return number


def check_memory(value: object) -> None:
    """value is "auto", "flat" or a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        if value <= 0:
            raise ValueError(f"memory must be 'auto', 'flat' or a positive number of bytes, got {value}")
    elif value not in ("auto", "flat"):
        raise ValueError(f"memory must be one of 'auto', 'flat', or a number of bytes, an int; got {value!r}")


def check_label_smoothing(value: object) -> None:
    """0 <= label_smoothing <= 1."""
    if not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ValueError(f"label_smoothing must lie in [0, 1], got {value!r}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> object:
    """value is one of the named choices; returns it."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}; got {value!r}")
    return value
