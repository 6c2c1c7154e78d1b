"""Names that torch 2.13 changed, in both spellings, in one place (torch 2.11 knows the old ones only)."""

from __future__ import annotations

from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed import _functional_collectives as _functional

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The functional collectives, for compiled graphs; their home is private in torch, and the only one.
functional = SimpleNamespace(
    all_gather=getattr(_functional, "all_gather_single_autograd", None) or _functional.all_gather_tensor_autograd,
    reduce_scatter=getattr(_functional, "reduce_scatter_single_autograd", None)
    or _functional.reduce_scatter_tensor_autograd,
    all_reduce=_functional.all_reduce,
    all_to_all=_functional.all_to_all_single_autograd,
)
