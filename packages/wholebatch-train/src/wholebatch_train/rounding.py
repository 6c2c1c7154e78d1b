"""How far rounding can move a gradient, measured: by gradients of features that are moved by about as much.

    t = sum_i J_i^T g_i(f_1, ..., f_n)      J_i: derivatives of example i's features f_i by the weights; g_i = dL/df_i

A right computation of t in floating point, of unit rounding u, is one of features with errors of some u |f_i|, and of
terms with relative errors of some u (it is backward stable). If the errors of examples are independent, that of t is

    E = | sum_i s_i J_i^T (g_i(f_1 + e |f_1| r_1, ...) - g_i(f_1, ...)) | + e | sum_i s_i J_i^T g_i(f_1, ...) |

with normal random numbers s_i, random unit vectors r_i, and e some u. It is at most sqrt(n) E if they are equal, as
those of equal examples can be. Where terms do not cancel, E is e |t| times the condition of the loss. Where they do, as
where all texts have equal features, |t| is about as large as its own error, and an error relative to |t| says nothing.
Because of the factors s_i, the terms of E do not cancel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .data.randomness import seeded

MOVED = {"fp32": 2**-17, "tf32": 2**-11}
"""e: 128 u in float32, whose sums have many terms; u in TF32, in which products are rounded, and sums are not."""


def moved_and_multiplied(by: float) -> Callable[[nn.Module, Any, Any], Any]:
    """Return a forward hook for encoders that return features (n, d), or a tuple of these, of scalars and of None.

    It moves the features by so much, e, and multiplies their gradients by random numbers: g_i becomes s_i g_i.
    """

    def move(output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_move(x, by, i) if isinstance(x, Tensor) and x.dim() else x for i, x in enumerate(output))
        return _move(output, by, 0)

    return lambda _module, _inputs, output: move(output)


def _move(features: Tensor, by: float, index: int) -> Tensor:
    generator = seeded("rounding", index)
    directions = F.normalize(torch.randn(features.shape, generator=generator), dim=-1).to(features)
    factors = torch.randn(len(features), 1, generator=generator).to(features)
    constant = features.detach()
    return constant + by * constant.norm(dim=-1, keepdim=True) * directions + factors * (features - constant)
