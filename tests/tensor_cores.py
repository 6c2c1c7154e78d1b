"""Products that are rounded and summed as tensor cores do, in Triton's interpreter: for tests of the kernels' check."""

from __future__ import annotations

import numpy as np
import torch


def matmul(a, b, total, *, parts, block=16):
    """Return `total` + a b in float32; factors have a number of parts of 11 bits, which bfloat16 and float16 fill once.

    Of several parts, the products of small and large ones come first, and those of two small ones are left out.
    """
    pairs = [(_high(a), _high(b))]
    if parts == 2:
        (high_a, high_b), (low_a, low_b) = pairs[0], (_high(a - _high(a)), _high(b - _high(b)))
        pairs = [(low_a, high_b), (high_a, low_b), *pairs]
    for first, second in pairs:
        if first.any() and second.any():
            for start in range(0, a.shape[1], block):
                total = _add(total, first[:, start : start + block], second[start : start + block])
    return total


def _high(x):
    """Return x without all but the first 11 bits of its significand."""
    return (x.view(np.int32) & ~0x1FFF).view(np.float32)


def _add(total, a, b):
    """Add a block's products, which are exact, to a sum: aligned with the largest, without their bits below 24."""
    terms = np.concatenate(
        [total[:, None].astype(np.float64), a[:, :, None].astype(np.float64) * b[None].astype(np.float64)], axis=1
    )
    last_bit = _last_bit(np.abs(terms).max(1, keepdims=True))
    summed = (np.trunc(terms / last_bit) * last_bit).sum(1)
    last_bit = _last_bit(np.abs(summed))
    return (np.trunc(summed / last_bit) * last_bit).astype(np.float32)


def _last_bit(x):
    """Return the value of the last of 24 bits of numbers that are not negative, and not below 2^-100."""
    exponents = np.maximum(x, 2.0**-100).view(np.int64) & 0x7FF << 52
    return exponents.view(np.float64) * 2.0**-23


def use(patch, multiply):
    """Let `tl.dot(a, b, total)` of the interpreter return `multiply(a, b, total)`, of NumPy's arrays in float32."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_, a, b, total, *__):
        factors = (z.data.astype(np.float32) for z in (a, b))
        return TensorHandle(multiply(*factors, total.data), total.dtype.scalar)

    patch.setattr(InterpreterBuilder, "create_dot", create_dot)


def round_to_nearest(patch):
    """Let the interpreter round float32 to half precision as a GPU does: it truncates, and warns of infinity."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast, halves = InterpreterBuilder.create_fp_trunc, {"bf16": torch.bfloat16, "fp16": torch.float16}

    def create_fp_trunc(builder, x, into):
        half = halves.get(into.scalar.name)
        if half is None or x.dtype.scalar.name != "fp32":
            return cast(builder, x, into)
        bits = torch.from_numpy(np.array(x.data)).to(half).view(torch.int16).numpy()
        return TensorHandle(bits.view(np.uint16 if half == torch.bfloat16 else np.float16), into.scalar)

    patch.setattr(InterpreterBuilder, "create_fp_trunc", create_fp_trunc)
