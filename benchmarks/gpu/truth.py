"""Exact values and gradients of losses from a similarity matrix of any size, a few rows of it at a time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import wholebatch as wb

SCALE, BIAS = 20.0, -5.0
FEW = 256  # rows whose gradient is compared
_PART = 1024  # rows of S at a time
_DOUBLE = 8192  # rows up to which products are float64
Truth = tuple[Tensor, Tensor, Tensor]  # the value, and the gradients of the first rows of x and of y


def truth(loss: str, x: Tensor, y: Tensor) -> Truth:
    """Return a loss of features as they are, and its gradients: in float64, of large batches in float32."""
    x, y = (z.detach().to(torch.float64 if len(z) <= _DOUBLE else torch.float32) for z in (x, y))
    if loss == "max_sim":
        leaves = x.requires_grad_(), y.requires_grad_()
        value = wb.reference.max_sim_loss(*leaves, logit_scale=1.0)
        of_x, of_y = torch.autograd.grad(value, leaves)
        return value.detach(), of_x[:FEW], of_y[:FEW]
    return _clip(x, y) if loss == "clip" else _siglip(x, y)


def _clip(x: Tensor, y: Tensor) -> Truth:
    of_rows, of_cols = [], torch.full((len(y),), -torch.inf, dtype=x.dtype, device=x.device)
    for part in x.split(_PART):
        s = SCALE * part @ y.T
        of_rows.append(s.logsumexp(1))
        of_cols = torch.logaddexp(of_cols, s.logsumexp(0))
    rows, target = torch.cat(of_rows), SCALE * (x * y).sum(1)
    value = ((rows + of_cols) / 2 - target).mean()

    def gradient(x: Tensor, y: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
        s = SCALE * x[:FEW] @ y.T
        p = (s - rows[:FEW, None]).exp() + (s - cols).exp()
        return SCALE / (2 * len(x)) * (p @ y - 2 * y[:FEW])

    return value, gradient(x, y, rows, of_cols), gradient(y, x, of_cols, rows)


def _siglip(x: Tensor, y: Tensor) -> Truth:
    total = sum(F.softplus(SCALE * part @ y.T + BIAS).sum(dtype=torch.float64) for part in x.split(_PART))
    value = (total - (SCALE * (x * y).sum(1) + BIAS).sum(dtype=torch.float64)) / len(x)

    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return SCALE / len(x) * ((SCALE * x[:FEW] @ y.T + BIAS).sigmoid() @ y - y[:FEW])

    return value, gradient(x, y), gradient(y, x)
