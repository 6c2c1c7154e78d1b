"""Inputs that need a gradient on any rank need one on all ranks; the factor of `sync` is applied here, once.

A rank whose local inputs need no gradient (a frozen tower, a rank without rows) would build no graph, would not call
the collectives of the backward pass, and would leave the other ranks waiting. So the handshake exchanges the list of
inputs that need a gradient, and these inputs join the graph on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._base.precision import wide_dtype
from ..comm import Communicator
from ..comm.handshake import GRAD_ENABLED, NEEDS_GRAD
from ..comm.records import FactsByRank
from ..sync import feature_factor, loss_parameters, scale_gradient
from .inputs import Inputs
from .options import Options

_K = TypeVar("_K")
_INFERENCE = "made in inference mode"


def gradient_facts(inputs: Sequence[Tensor | float | None]) -> dict[str, Any]:
    """Return the facts about gradients that a handshake exchanges; `GRAD_ENABLED` belongs to its `must_match`."""
    return {
        GRAD_ENABLED: torch.is_grad_enabled(),
        NEEDS_GRAD: [isinstance(x, Tensor) and x.requires_grad for x in inputs],
        _INFERENCE: any(isinstance(x, Tensor) and x.is_inference() for x in inputs),
    }


def check_inference(everyone: FactsByRank) -> None:
    """Raise ValueError, on every rank, if gradients are needed but some rank's inputs were made in inference mode."""
    inference = [rank for rank, flag in enumerate(everyone.column(_INFERENCE)) if flag]
    if inference and torch.is_grad_enabled() and any(map(any, everyone.column(NEEDS_GRAD))):
        raise ValueError(
            f"tensors of rank {', '.join(map(str, inference))} were made under torch.inference_mode() and cannot take "
            "part in a backward pass, which others need; make them under torch.no_grad(), or pass x.clone()"
        )


def join(inputs: Mapping[_K, Any], needed: Sequence[bool]) -> dict[_K, Any]:
    """Return the inputs; each one that needs a gradient on any rank, as `needed` says, needs it here as well."""
    return {
        name: x if not want or (isinstance(x, Tensor) and x.requires_grad) else _requiring_grad(x)
        for (name, x), want in zip(inputs.items(), needed, strict=True)
    }


def _requiring_grad(x: Tensor | float | None) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach().requires_grad_()
    return torch.tensor(0.0 if x is None else float(x), dtype=torch.float64, device="cpu", requires_grad=True)


def enter(values: dict[str, Any], inputs: Inputs, comm: Communicator, options: Options) -> dict[str, Any]:
    """Return the inputs, whose gradients are multiplied by the factor of `sync`.

    Gradients of replicated inputs get this factor here and nowhere else. Learned scalars (`loss_parameters`) and
    parameters of which each rank holds a part (`sync.shard_factor`) have factors of their own.

    With reduction "none" each rank computes a scalar from its losses; the engine averages or adds the gradients of
    these scalars as usual, and no factor is needed here.

    Scalars and weights are widened to float64: a loss is computed from statistics in float64, and the gradient by a
    weight is a small difference of two terms, from the sum and from the divisor of the mean.
    """
    names = [*inputs.scalars, *inputs.parameters]
    for name in (*names, "weights"):
        x = values[name]
        if isinstance(x, Tensor):
            values[name] = x.to(wide_dtype(x.device))
    if options.reduction == "none" or comm.size == 1:
        return values
    values.update(zip(names, loss_parameters([values[name] for name in names], comm, options.sync), strict=True))
    factor = feature_factor(options.sync, comm.size)
    for name, x in values.items():
        if name not in names and isinstance(x, Tensor) and x.requires_grad:
            values[name] = scale_gradient(x, factor)
    return values
