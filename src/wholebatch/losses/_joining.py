"""Backward passes that all ranks enter together.

A rank whose own inputs need no gradient (a frozen tower, a rank without rows) would build no graph, never call the
collectives of the backward pass, and leave the other ranks waiting. So the ranks tell each other in the handshake
which inputs need a gradient anywhere, and those inputs join everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.handshake import GRAD_ENABLED, NEEDS_GRAD

_INFERENCE = "made in inference mode"


def gradient_facts(inputs: Sequence[Tensor | float | None]) -> dict[str, Any]:
    """What a handshake says about gradients; `GRAD_ENABLED` belongs to its `must_match`."""
    return {
        GRAD_ENABLED: torch.is_grad_enabled(),
        NEEDS_GRAD: [isinstance(x, Tensor) and x.requires_grad for x in inputs],
        _INFERENCE: any(isinstance(x, Tensor) and x.is_inference() for x in inputs),
    }


def join(inputs: Sequence[Tensor | float | None], everyone: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The inputs, each one that needs a gradient on any rank made to need it here as well.

    Raises:
        ValueError: on every rank, if gradients are needed but some rank's inputs were made in inference mode.
    """
    wanted = [any(column) for column in zip(*(facts[NEEDS_GRAD] for facts in everyone), strict=True)]
    inference = [rank for rank, facts in enumerate(everyone) if facts[_INFERENCE]]
    if any(wanted) and torch.is_grad_enabled() and inference:
        raise ValueError(
            f"tensors of rank {', '.join(map(str, inference))} were made under torch.inference_mode() and cannot take "
            "part in a backward pass, which others need; make them under torch.no_grad(), or pass x.clone()"
        )
    return [_requiring_grad(x) if want else x for x, want in zip(inputs, wanted, strict=True)]


def _requiring_grad(x: Tensor | float | None) -> Tensor:
    if isinstance(x, Tensor):
        return x if x.requires_grad else x.detach().requires_grad_()
    return torch.tensor(0.0 if x is None else float(x), dtype=torch.float64, requires_grad=True)
