"""DistributedDataParallel: its switch, and the parameters that it reduces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...comm.join_context import refuse_join_context
from .sync_control import SyncControl, with_attributes


@contextmanager
def _hold(module: Any) -> Iterator[None]:
    """Keep a DistributedDataParallel from reducing, also one with a static graph.

    With static_graph=True, the first backward pass through the module starts a delayed reduction of all parameters,
    whatever no_sync() says. The module reads this attribute of its Python object where it would start it. It also
    counts the gradients of each parameter until its second synchronization, and later waits for as many: held passes
    are hidden from it.
    """
    static = module.static_graph
    with module.no_sync():
        module.static_graph = False
        try:
            yield
        finally:
            module.static_graph = static


def parameters_of_ddp(module: DistributedDataParallel) -> Iterator[tuple[str, Tensor]]:
    """Return the parameters whose gradients a DistributedDataParallel reduces, with their names in its module."""
    ignored = getattr(module, "parameters_to_ignore", ())
    return ((name, p) for name, p in module.module.named_parameters() if p.requires_grad and name not in ignored)


def _awaited(module: Any) -> Iterable[Tensor]:
    """Return all parameters of a DistributedDataParallel, unless it finds unused ones itself."""
    finds = module.find_unused_parameters and not module.static_graph
    return () if finds else (p for _, p in parameters_of_ddp(module))


def _check(module: Any) -> None:
    if module.process_group.size() > 1:
        refuse_join_context()


DDP = SyncControl(
    lambda module: isinstance(module, DistributedDataParallel),
    _hold,
    decides="forward",
    collective=False,
    check=_check,
    awaits=_awaited,
    is_off=lambda module: not module.require_backward_grad_sync,
    resume=lambda module: with_attributes(module, require_backward_grad_sync=True),  # also inside of no_sync()
    hides=lambda module: module.static_graph,
)
