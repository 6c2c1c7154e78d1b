"""The products of a sweep, S = X Y^T, dS Y and dS^T X: to which numbers their factors are rounded before.

    precision    factors of a product                       largest relative error of a factor
    float64      as they are, for float64 features          2^-53
    float32      as they are; half precision is widened     2^-24
    bfloat16x3   hi + lo, both bfloat16; three products     2^-16
    tf32         float32 with 10 bits after the point       2^-11
    float16      float16                                    2^-11
    bfloat16     bfloat16                                   2^-8

Every sum is in float32 (float64 for float64), and so are the tiles of S. With a = a_hi + a_lo and b = b_hi + b_lo

    a b ~ a_hi b_hi + a_hi b_lo + a_lo b_hi        (the term a_lo b_lo, 2^-16 of the product, is left out)

On a GPU all but the first two run on tensor cores. A CPU has no such products: there the factors are rounded in the
same way and multiplied in float32, which shows the accuracy of a GPU, not its speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Literal

import torch
from torch import Tensor

from .._base.precision import accumulation_dtype, tf32_is_allowed
from .._base.warnings import warn

Precision = Literal["auto", "float32", "tf32", "bfloat16", "float16", "bfloat16x3"]
PRECISIONS = ("auto", "float32", "tf32", "bfloat16", "float16", "bfloat16x3")
Factor = tuple[Tensor, ...]  # the parts of a factor, whose sum it is: hi, or hi and lo

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16, "bfloat16x3": torch.bfloat16}
_ERROR = {"float32": 0.0, "bfloat16x3": 2.0**-16, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_TENSOR_CORES = (8, 0)  # the first compute capability with TF32


@dataclass(frozen=True)
class Products:
    """The precision of the products of one call, which all ranks share."""

    precision: str = "float32"  # as above; "float32" stands for float64 where features are float64
    # named: whether the caller asked for it. Then "float32" and "tf32" hold whatever the program allows CUDA
    named: bool = False
    # units: whether dS / unit is multiplied instead of dS, with a unit such that it fits into float16. Then dS of
    # "bfloat16" is in float16, 8 times more exact, and so are its factors, rows of bfloat16: float16 holds these
    # exactly if they are neither long nor tiny
    units: bool = False

    @cached_property
    def half(self) -> torch.dtype | None:
        """The dtype of a factor's parts, if it is a half precision."""
        return _HALF.get(self.precision)

    @cached_property
    def parts(self) -> int:
        """The number of parts of a factor."""
        return 2 if self.precision == "bfloat16x3" else 1

    @cached_property
    def rounds_gradients(self) -> bool:
        """Whether dS is rounded to half precision, so that its largest entries are better multiplied apart."""
        return self.half is not None and self.parts == 1

    @cached_property
    def gradient_dtype(self) -> torch.dtype | None:
        """The dtype of dS, and of the rows that it is multiplied with, if it is rounded to half precision."""
        if not self.rounds_gradients:
            return None
        return torch.float16 if self.units else self.half

    @cached_property
    def bytes_of_gradients(self) -> int:
        """Bytes of an entry of dS in half precision, beside the tiles in the accumulation dtype."""
        return 0 if self.half is None else self.parts * self.half.itemsize

    @cached_property
    def error(self) -> float:
        """The largest relative error of a product of two rows by the rounding of both."""
        return (1 + _ERROR[self.precision]) ** 2 - 1

    @cached_property
    def in_units(self) -> Products:
        """The products of dS / unit."""
        return replace(self, units=True)

    @property
    def allows_tf32(self) -> bool:
        """Whether CUDA may multiply float32 in TF32."""
        return self.precision == "tf32" if self.named else tf32_is_allowed()

    def rounded(self, x: Tensor) -> Tensor:
        """Return rows in the dtype in which they are multiplied, if a single part has it; else the rows themselves."""
        return x.to(self.half) if self.half is not None and self.parts == 1 and x.dtype != torch.float64 else x

    def dtypes(self, x: torch.dtype) -> tuple[torch.dtype, ...]:
        """Return the dtypes of the parts of a factor whose rows have dtype x."""
        if self.half is None or x == torch.float64:
            return (accumulation_dtype(x),)
        return (self.half,) * (1 if x == self.half else self.parts)

    def dtype_in_kernels(self, x: torch.dtype) -> torch.dtype | None:
        """Return the dtype of factors, and of dS, in kernels; None where kernels have no such products."""
        if self.parts > 1:
            return None
        return self.half or (accumulation_dtype(x) if self.named else x)

    def needs_unit(self, x: torch.dtype, *, in_kernels: bool) -> bool:
        """Whether dS is written in float16, and has to be scaled to fit."""
        return torch.float16 in (self.half, self.gradient_dtype, x if in_kernels else None)

    def rounds(self, x: Tensor) -> bool:
        """Whether rows have to be rounded, or widened, before they are multiplied."""
        return self.dtypes(x.dtype) != (x.dtype,) or self._emulates_tf32(x)

    def split(self, x: Tensor, into: Sequence[Tensor]) -> Factor:
        """Return x as a factor in the memory of its parts; x may lose its values."""
        for number, part in enumerate(into):
            part.copy_(x)
            if number + 1 < len(into):
                x.sub_(part)
        return self.rounded_(*into)

    def rounded_(self, *parts: Tensor) -> Factor:
        """Return parts as a factor; a CPU rounds them to TF32 in place, which a GPU does in the product."""
        if self._emulates_tf32(parts[0]):
            _round_to_tf32_(parts[0])
        return parts

    def beside_gradient(self, rows: Factor) -> Factor:
        """Return rows of X or Y in the dtype in which they are multiplied with dS."""
        return rows if self.gradient_dtype is None else tuple(part.to(self.gradient_dtype) for part in rows)

    def multiply(self, a: Factor, b: Factor, out: Tensor, *, add: bool = False) -> Tensor:
        """Write a b to `out`, in its precision; with `add`, add it to `out`."""
        for number, (left, right) in enumerate(_pairs(a, b)):
            self._multiply(left, right, out, add=add or number > 0)
        return out

    def scaled(self, scale: float | Tensor, a: Factor, b: Factor, out: Tensor) -> Tensor:
        """Write scale a b to `out`, in its precision; scale multiplies the sums, not the factors."""
        if not _has_products_of_halves(a[0], out) or isinstance(scale, Tensor):
            # Given as alpha, a CPU's library may scale and round the entries of one factor first.
            self.multiply(a, b, out)
            return out.mul_(scale) if isinstance(scale, Tensor) or scale != 1 else out
        for number, (left, right) in enumerate(_pairs(a, b)):
            torch.addmm(out, left, right, beta=number > 0, alpha=scale, out_dtype=out.dtype, out=out)
        return out

    def _emulates_tf32(self, x: Tensor) -> bool:
        return self.precision == "tf32" and x.device.type != "cuda"

    def _multiply(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> None:
        if _has_products_of_halves(a, out):
            if add:
                torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
            else:
                torch.mm(a, b, out_dtype=out.dtype, out=out)
            return
        a, b = a.to(out.dtype), b.to(out.dtype)
        with _tf32(self.allows_tf32) if self.named and a.device.type == "cuda" else nullcontext():
            if add:
                out.addmm_(a, b)
            else:
                torch.mm(a, b, out=out)


def _pairs(a: Factor, b: Factor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the parts that are multiplied with each other: all but lo and lo."""
    for i, left in enumerate(a):
        yield from ((left, right) for right in b[: 2 - i])


def _has_products_of_halves(a: Tensor, out: Tensor) -> bool:
    """Return whether factors in half precision are multiplied as they are, with sums in the precision of `out`."""
    return a.dtype != out.dtype and a.device.type == "cuda"


def transposed(factor: Factor) -> Factor:
    """Return the transpose of a factor."""
    return tuple(part.T for part in factor)


def columns(factor: Factor, cols: slice) -> Factor:
    """Return some columns of a factor."""
    return tuple(part[:, cols] for part in factor)


def rows_of(factor: Factor, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return some rows of a factor, (k, n), in a wider dtype."""
    total = factor[0][index].to(dtype)
    for part in factor[1:]:
        total += part[index]
    return total


def select_products(
    precision: Precision, dtype: torch.dtype, device: torch.device, autocast: torch.dtype | None
) -> Products:
    """Return the products of a call, from its argument `precision`, its features, and the autocast around it.

    "auto" is float32 on every device but CUDA. There it is the half precision that the features have, or else the one
    that autocast rounds products to, or TF32 where the program allows it.

    Raises:
        ValueError: for a precision that the features or their device do not have.
    """
    if precision != "auto":
        _check(precision, dtype, device)
        return Products(precision, named=True)
    if dtype == torch.float64 or device.type != "cuda":
        return Products()
    half = dtype if dtype != torch.float32 else autocast
    if half in _HALF.values():
        missing = _missing(half, device) or _missing(torch.float16, device)  # that of dS
        if missing is None:
            return Products(str(half).removeprefix("torch."))
        _warn(str(half), missing)
    return Products("tf32" if tf32_is_allowed() else "float32")


def _check(precision: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless the features and their device have a named precision."""
    if dtype == torch.float64:
        raise ValueError(
            f"precision must be 'auto' for float64 features, which are multiplied in float64, got {precision!r}; cast "
            "the features to float32"
        )
    if precision == "float32" or device.type == "cpu":
        return
    has, half = ["auto", "float32"], _HALF.get(precision)
    if device.type != "cuda":
        missing: str | None = f"{device.type} has no such products"
    elif half is not None:
        missing = _missing(half, device) or _missing(torch.float16, device)
    else:
        is_old = torch.version.hip is None and torch.cuda.get_device_capability(device) < _TENSOR_CORES
        missing = "this GPU has no TF32" if is_old else None
    if missing is not None:
        raise ValueError(f"precision must be one of {has} here, got {precision!r}: {missing}")


@cache
def _missing(half: torch.dtype, device: torch.device) -> str | None:
    """Return why a GPU cannot multiply half precision with sums in float32; None if it can.

    It multiplies matrices of small whole numbers, whose products are exact in float32 and not in half precision, and
    writes over NaN. The host waits for the result, once in a process.
    """
    a, b = (
        torch.arange(-n, 64 * 64 - n, dtype=torch.float32, device="cpu").remainder_(m).view(64, 64)
        for n, m in ((7, 31), (3, 29))
    )
    truth, products = 5 * (a @ b), Products(str(half).removeprefix("torch."))
    a, b = a.to(device, half), b.to(device, half)
    out, once = (torch.full((64, 64), float("nan"), device=device) for _ in range(2))
    try:
        products.scaled(3.0, (a,), (b,), out)
        products.multiply((a,), (b,), out, add=True)
        out.add_(products.multiply((a,), (b,), once))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        return f"torch.addmm with out_dtype=torch.float32 fails: {str(error).splitlines()[0]}"
    return None if torch.equal(out.cpu(), truth) else "torch.addmm with out_dtype=torch.float32 gives wrong results"


@cache
def _warn(half: str, missing: str) -> None:
    """Warn once in a process."""
    warn(f"wholebatch multiplies {half} features in float32 on this device: {missing}")


def _round_to_tf32_(x: Tensor) -> Tensor:
    """Round float32 to 10 bits after the point, ties to even, in place."""
    bits = x.view(torch.int32)
    bits.add_((bits >> 13 & 1).add_(0xFFF)).bitwise_and_(~0x1FFF)
    return x


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Let CUDA multiply float32 in TF32 inside, or not."""
    settings, precision = torch.backends.cuda.matmul, "tf32" if allowed else "ieee"
    before = settings.fp32_precision
    if before == precision:
        yield
        return
    settings.fp32_precision = precision
    try:
        yield
    finally:
        settings.fp32_precision = before
