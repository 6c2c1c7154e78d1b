"""The error of each loss in each precision of products, against float64 on the same device."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from precision_losses import LOSSES, value_and_gradients
from torch.nn import functional as F

from .device import Row, relative, unit_rows

# Relative errors of gradients: of sums in float32, and of factors of 24, 10, 10 and 7 bits in a softmax of scale 50.
ALLOWED = {"auto": 1e-4, "float32": 1e-4, "bfloat16x3": 3e-4, "tf32": 2e-2, "float16": 2e-2, "bfloat16": 0.1}


def precision() -> Iterator[Row]:
    """Yield the errors of each loss in each precision; raise if one is large."""
    for name, (ours, truth, _) in LOSSES.items():
        for scale in (10.0, 50.0):
            torch.manual_seed(0)
            x = unit_rows(384, 96)
            y = F.normalize(0.4 * x + 0.6 * unit_rows(384, 96), dim=1)
            value, grad = value_and_gradients(truth, x.double(), y.double(), scale)
            for mode, bound in ALLOWED.items():
                got, of = value_and_gradients(ours, x, y, scale, precision=mode)
                row = {"loss": name, "scale": scale, "precision": mode}
                row |= {"error_of_loss": relative(got, value), "error_of_gradient": relative(of, grad)}
                yield row
                if not row["error_of_gradient"] <= bound:
                    raise AssertionError(f"{row}: more than {bound}")
