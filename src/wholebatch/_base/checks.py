"""Checks of tensors, one function each; an error names the argument, the accepted and the given value, and the fix.

The checks of flags, numbers and names are in `settings`, which imports no torch; they are exported here as well.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor, nn

from .normalize import known_norms
from .precision import accumulation_dtype
from .settings import SMALLEST_DIVISOR, shown_with_type
from .settings import check_callable as check_callable
from .settings import check_choice as check_choice
from .settings import check_count as check_count
from .settings import check_flag as check_flag
from .settings import check_fraction as check_fraction
from .settings import check_instance as check_instance
from .settings import check_integer as check_integer
from .settings import check_items as check_items
from .settings import check_label_smoothing as check_label_smoothing
from .settings import check_memory as check_memory
from .settings import check_number as check_number
from .settings import check_positive_number as check_positive_number
from .settings import check_real as check_real
from .settings import check_sequence as check_sequence
from .settings import check_weight as check_weight
from .settings import checked_path as checked_path
from .settings import is_dtensor as is_dtensor
from .settings import shown as shown

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_K = TypeVar("_K")
_ADDRESSABLE = 2**63 - 1  # bytes, at most, of a tensor
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_features(name: str, x: object) -> None:
    """Raise ValueError unless x is a floating-point matrix (rows, embedding size)."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor of shape (rows, embedding size), got {shown_with_type(x)}")
    check_dense(name, x)
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(
            f"{name} must have shape (rows, embedding size) with embedding size >= 1, got {tuple(x.shape)}; "
            "a rank without rows passes shape (0, embedding size)"
        )
    if x.dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}; pass the encoder's output, not ids"
        )


def has_feature_dtype(x: object) -> TypeGuard[Tensor]:
    """Whether x is a tensor of a dtype that features may have."""
    return isinstance(x, Tensor) and x.dtype in _DTYPES


def check_dense(name: str, x: Tensor) -> None:
    """Raise ValueError unless x is dense and has data: not sparse, nested, quantized, on a meta device, a DTensor."""
    if not is_dense(x):
        kind = "a nested tensor" if x.is_nested else f"dtype {x.dtype}" if x.is_quantized else f"layout {x.layout}"
        kind = shown(x) if is_dtensor(x) else f"{kind} on device {x.device}"
        raise ValueError(f"{name} must be a dense tensor with data, got {kind}")


def is_dense(x: object) -> TypeGuard[Tensor]:
    """Whether x is a dense tensor with data."""
    return (
        isinstance(x, Tensor)
        and not is_dtensor(x)
        and x.layout is torch.strided
        and not x.is_nested
        and not x.is_quantized
        and x.device.type != "meta"
    )


def check_floating_dtype(name: str, dtype: object) -> None:
    """Raise ValueError unless dtype is one that features may have."""
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES:
        raise ValueError(f"{name} must be torch.float64, float32, bfloat16 or float16, got {shown(dtype)}")


def checked_device(name: str, device: object) -> torch.device:
    """Return a torch.device, which may be given by its name."""
    if not isinstance(device, torch.device | str):
        raise ValueError(f"{name} must be a torch.device or its name, such as 'cpu' or 'cuda:0'; got {shown(device)}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{name} must be a torch.device or its name, got {shown(device)}: {error}") from None


def allocated(
    name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Return an uninitialized tensor, if this machine has the memory for its shape."""
    where = torch.get_default_device() if device is None else torch.device(device)
    num_bytes = math.prod(shape) * (dtype or torch.get_default_dtype()).itemsize
    most = _memory_bytes() if where.type == "cpu" else _ADDRESSABLE
    if num_bytes > most:
        raise ValueError(
            f"{name} ask for a tensor of shape {shape}, {num_bytes:.3g} bytes; this machine has {most:.3g}: "
            "check the numbers, or share it among more ranks"
        )
    return torch.empty(shape, dtype=dtype, device=device)


def _memory_bytes() -> int:
    """Return the memory of this machine; where the system does not report it, all addressable memory."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return _ADDRESSABLE
    return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _ADDRESSABLE)


def on_host(numbers: Mapping[_K, Tensor | float] | Mapping[_K, Tensor]) -> dict[_K, float]:
    """Copy tensors of one element to the host, as numbers; the host waits once for each device."""
    tensors = {name: x for name, x in numbers.items() if isinstance(x, Tensor)}
    values: dict[_K, float] = dict(numbers)  # type: ignore[arg-type]  # in the same order
    devices = {x.device for x in tensors.values()}
    for device in devices:
        local = tensors if len(devices) == 1 else {name: x for name, x in tensors.items() if x.device == device}
        shaped = [x.reshape(()) if x.dim() else x for x in local.values()]
        values.update(zip(local, torch.stack(shaped).tolist(), strict=True))  # in the widest of their dtypes
    return values


def norm_bound(x: Tensor) -> Tensor:
    """Return the largest norm of x's rows, shape (); 0 without rows."""
    dtype = accumulation_dtype(x.dtype)
    if not x.shape[0]:
        return x.new_zeros((), dtype=dtype)
    return torch.linalg.vector_norm(x.detach(), dim=1, dtype=dtype).amax()


def check_norm(name: str, x: Tensor, largest: float) -> float:
    """Return the largest norm of x's rows, given `norm_bound`, if no entry of x is NaN or infinite.

    Where squares have overflowed the norm is computed again, and is infinite only if no float is that large.
    """
    if math.isfinite(largest):
        return largest
    check_finite(name, x)
    return known_norms(x).amax().item()


def check_finite(name: str, x: Tensor) -> None:
    """Raise ValueError if an entry of x is NaN or infinite."""
    if x.numel() and (x.is_floating_point() or x.is_complex()):
        largest = torch.linalg.vector_norm(x.detach(), ord=math.inf).item()
        if not math.isfinite(largest):
            bad_rows = (~x.isfinite()).reshape(len(x) if x.dim() else 1, -1).any(1)
            row = f", first in row {int(bad_rows.int().argmax())}" if x.dim() else ""
            raise ValueError(
                f"{name} must be finite, its largest absolute entry is {largest}{row}; check for an overflow, a "
                "division by the norm of a zero vector, or a learning rate that is too high"
            )


def check_alike(name_x: str, x: Tensor, name_y: str, y: Tensor, *, rows: bool) -> None:
    """Raise ValueError unless x and y have the same embedding size, dtype and device, and with `rows` as many rows."""
    for property_, value_x, value_y, fix in (
        ("shape", tuple(x.shape), tuple(y.shape), "row i of one belongs to row i of the other")
        if rows
        else ("embedding size", x.shape[1], y.shape[1], "each row of one meets each row of the other"),
        ("dtype", x.dtype, y.dtype, "cast one of them"),
        ("device", x.device, y.device, "move one of them"),
    ):
        if value_x != value_y:
            raise ValueError(
                f"{name_x} and {name_y} must have the same {property_}, got {value_x} and {value_y}; {fix}"
            )


def check_ids(name: str, ids: object, side: str, rows: int) -> None:
    """Raise ValueError unless ids has one integer for each row of the features `side`."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        got = ids.dtype if isinstance(ids, Tensor) else shown_with_type(ids)
        raise ValueError(
            f"{name} must be a tensor of integers, one for each row of {side}, got {got}; {_fix_of_ids(name, ids)}"
        )
    check_dense(name, ids)
    if ids.shape != (rows,):
        raise ValueError(
            f"{name} must have shape ({rows},), one integer for each row of {side}, got {tuple(ids.shape)}"
            f"{_fix_of_shape(ids, rows)}"
        )


def check_data(name: str, x: object, side: str, rows: int) -> None:
    """Raise ValueError unless x is a vector with one number for each row of the features `side`."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor with a number for each row of {side}, got {shown_with_type(x)}")
    check_dense(name, x)
    if x.dim() != 1 or len(x) != rows:
        raise ValueError(f"{name} must have shape ({rows},), one number for each row of {side}, got {tuple(x.shape)}")
    if x.is_complex():
        raise ValueError(f"{name} must be real numbers, integers or booleans, got {x.dtype}")


def _fix_of_ids(name: str, ids: object) -> str:
    if isinstance(ids, Tensor):
        return "for one-hot rows pass the argmax(1)" if ids.dim() == 2 and ids.shape[1] > 1 else "cast with .long()"
    texts = isinstance(ids, list | tuple) and any(isinstance(row_ids, str) for row_ids in ids)
    return "give each text a number first" if texts else f"pass torch.tensor({name})"


def _fix_of_shape(ids: Tensor, rows: int) -> str:
    if ids.dim() < 2 or ids.shape[0] != rows:
        return ""
    return "; pass it with .squeeze(1)" if ids.shape == (rows, 1) else "; for one-hot rows pass the argmax(1)"


def check_weights(name: str, weights: object, side: str, rows: int) -> None:
    """Raise ValueError unless weights has one number for each row of the features `side`."""
    if not isinstance(weights, Tensor) or weights.dtype not in _DTYPES:
        got = weights.dtype if isinstance(weights, Tensor) else shown_with_type(weights)
        raise ValueError(f"{name} must be a floating-point tensor, one number for each row of {side}, got {got}")
    check_dense(name, weights)
    if weights.shape != (rows,):
        raise ValueError(f"{name} must have shape ({rows},), one for each row of {side}, got {tuple(weights.shape)}")


def check_not_negative(name: str, weights: Tensor, minimum: float, total: float) -> float:
    """Return the sum of weights, given their minimum and their sum, if they are finite and not negative."""
    if not math.isfinite(total):
        wrong = weights[~weights.isfinite()]
        raise ValueError(f"{name} must be finite, got {wrong[0].item() if len(wrong) else total}")
    if minimum < 0:
        raise ValueError(f"{name} must not be negative, got {minimum}; 0 leaves an example out")
    return total


def check_ignore_index(label: object) -> None:
    """Raise ValueError unless a label whose rows are left out is an integer that labels may be."""
    check_integer("ignore_index", label, minimum=-(2**63), maximum=2**63 - 1)


def check_scalar(name: str, value: object) -> float:
    """Return value as a float if it is a finite number, or a floating-point tensor of one element, () or [1]."""
    check_one(name, value)
    return check_value(name, value.detach().item() if isinstance(value, Tensor) else check_real(name, value))


def check_one(name: str, value: object) -> None:
    """Raise ValueError unless value is a real number, or a floating-point tensor of one element."""
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.numel() != 1 or value.dim() > 1 or not value.is_floating_point():
            raise ValueError(
                f"{name} must be a number or a floating-point tensor of shape () or [1], "
                f"got shape {tuple(value.shape)} and {value.dtype}"
            )
    elif isinstance(value, nn.Module):
        raise ValueError(
            f"{name} must be a number or a tensor of one element, got {shown(value)}, a module; pass the value of "
            "a wb.Scale: scale() as a logit scale, 1 / scale() as a temperature"
        )
    else:
        check_real(name, value, or_=" or a tensor of one element")


def check_value(name: str, number: float) -> float:
    """Return a scalar that may be learned, as a float, if it is finite and within the range of float32."""
    return check_number(name, check_real(name, number), fix="clamp it, and check the learning rate")


def check_temperature(name: str, value: object) -> float:
    """Return value as a float if it is a scalar as for `check_scalar`, and positive."""
    return check_positive(name, check_scalar(name, value))


def check_positive(name: str, number: float) -> float:
    """Return number, a temperature, if it is positive, and so large that similarities divided by it do not overflow."""
    if number <= 0:
        raise ValueError(
            f"{name} must be positive, got {number}; logits are similarities divided by it. To learn one that stays "
            "positive, pass 1 / scale() of a scale = wb.Scale(10.0)"
        )
    if number < SMALLEST_DIVISOR:
        raise ValueError(
            f"{name} must be at least {SMALLEST_DIVISOR}, got {number}; logits are similarities divided by it"
        )
    return number
