"""Tensors in a form that backends can move and sum.

A movement keeps every bit: dtypes that backends do not know travel as another dtype of the same size. A sum is taken in
a dtype that is wide enough: half precision in float32, 16-bit integers in 32 bits, complex numbers as pairs of reals.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._base.precision import accumulation_dtype
from .transport import Finish

_CARRIERS = {
    getattr(torch, name): carrier
    for carrier, names in (
        (torch.uint8, ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")),
        (torch.float16, ("int16", "uint16")),
        (torch.int32, ("uint32", "complex32")),
        (torch.int64, ("uint64",)),
    )
    for name in names
    if hasattr(torch, name)
}


def _plain(x: Tensor) -> Tensor:
    """Return x as transports move it: contiguous, with no conjugation or negation pending."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def start_move(x: Tensor, start: Callable[[Tensor], Finish], scale: float = 1.0) -> Finish:
    """Start to move x by `start`; dtypes that backends do not know travel as others of the same size, bit for bit."""
    wire, carrier = _plain(x), _CARRIERS.get(x.dtype)
    moved = start(wire if carrier is None else wire.view(carrier))
    finish = moved if carrier is None else lambda: moved().view(x.dtype)
    return finish if scale == 1 else lambda: finish() * scale


def start_reduction(x: Tensor, start: Callable[[Tensor], Finish], scale: float = 1.0) -> Finish:
    """Start to sum or compare x by `start`; what is narrow is widened, complex numbers travel as pairs of real ones."""
    # backends have no 16-bit integers
    wide = _plain(x).to(torch.int32 if x.dtype == torch.int16 else accumulation_dtype(x.dtype))
    finish = start(torch.view_as_real(wide) if wide.is_complex() else wide)

    def result() -> Tensor:
        y = finish()
        if wide.is_complex():
            y = torch.view_as_complex(y)
        return (y * scale if scale != 1 else y).to(x.dtype)

    return result
