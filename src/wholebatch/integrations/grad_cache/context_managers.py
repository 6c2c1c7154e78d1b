"""RandContext: random numbers are the same in a second forward pass as in the first."""

from __future__ import annotations

from torch import Tensor

from ...gradcache.replay import Replay

__all__ = ["RandContext"]


class RandContext:
    """A context in which random numbers are those that came after its construction.

    Afterward the generators continue where they were before the context.

    Args:
        tensors: without effect: generators of all devices, of Python and of NumPy are recorded.

    >>> import torch
    >>> context = RandContext()
    >>> first = torch.rand(3)
    >>> with context:
    ...     second = torch.rand(3)
    >>> torch.equal(first, second)
    True
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._inside = Replay()

    def __enter__(self) -> None:
        self._outside = Replay()
        self._inside.rewind()

    def __exit__(self, *error: object) -> None:
        self._outside.rewind()
