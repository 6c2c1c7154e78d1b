"""Functions of torch.distributed whose names differ between releases or are private, in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch.distributed as dist
from torch.distributed import _functional_collectives as _functional
from torch.distributed import distributed_c10d

# torch 2.13 changed these names; torch 2.11 knows the old ones only.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# The functional collectives, for compiled graphs; torch has them in a private module only.
functional = SimpleNamespace(
    all_gather=getattr(_functional, "all_gather_single_autograd", None) or _functional.all_gather_tensor_autograd,
    reduce_scatter=getattr(_functional, "reduce_scatter_single_autograd", None)
    or _functional.reduce_scatter_tensor_autograd,
    all_reduce=_functional.all_reduce,
    all_to_all=_functional.all_to_all_single_autograd,
)

_NAMING = "_process_group_name"


@contextmanager
def next_group_is_named(name: str) -> Iterator[None]:
    """Give the next `dist.new_group` inside this name, under which its ranks meet in the store.

    torch makes a name from the group's ranks and the number of groups that this rank knows. Ranks that have not been in
    the same groups so far would wait for each other under different names; and after a group's end its name returns,
    with the addresses of ranks that are gone. Where a release of torch names groups elsewhere, torch's name stays.
    """
    naming = getattr(distributed_c10d, _NAMING, None)
    if naming is None:
        yield
        return
    setattr(distributed_c10d, _NAMING, lambda *_args, **_options: name)
    try:
        yield
    finally:
        setattr(distributed_c10d, _NAMING, naming)
