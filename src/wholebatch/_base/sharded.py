"""Parameters that are not replicated: each rank holds a part of them, or its own values.

They are recognized by a mark (PartialFC's centers), by their type (FSDP2's DTensors), or by the marks that Megatron and
DeepSpeed set on tensor-parallel parameters and on experts.
"""

from __future__ import annotations

from torch import Tensor

from .graph import leaves_of

_MARK = "_wholebatch_sharded"


def mark_sharded(*tensors: Tensor | None) -> None:
    """Mark these tensors, and the parameters that they are computed from, as sharded; copies lose the mark."""
    present = [x for x in tensors if isinstance(x, Tensor)]
    for x in (*present, *leaves_of(present)):
        setattr(x, _MARK, True)


def is_sharded(x: Tensor) -> bool:
    """Whether ranks may hold different values of this parameter.

    >>> import torch
    >>> centers = torch.nn.Parameter(torch.zeros(2))
    >>> mark_sharded(centers)
    >>> is_sharded(centers), is_sharded(torch.nn.Parameter(torch.zeros(2)))
    (True, False)
    """
    return (
        getattr(x, _MARK, False)
        or type(x).__torch_dispatch__ is not Tensor.__torch_dispatch__
        or getattr(x, "tensor_model_parallel", False) is True
        or getattr(x, "allreduce", True) is False
    )
