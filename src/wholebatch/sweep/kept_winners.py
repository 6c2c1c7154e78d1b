"""Winners that the forward pass keeps for the backward pass, which then finds none again."""

from __future__ import annotations

import torch
from torch import Tensor


class KeptWinners:
    """Entries of S and winners of the first tiles of a sweep, as many as fit into one buffer of bytes."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        self._used = 0

    def next(
        self, tile: tuple[int, int], dtype: torch.dtype, winners: tuple[int, int], integer: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Return the memory of the next tile, in the order of the sweep; None if that tile is not kept."""
        parts = [self._part(shape, entry_dtype) for shape, entry_dtype in ((tile, dtype), (winners, integer))]
        return None if parts[0] is None or parts[1] is None else (parts[0], parts[1])

    def _part(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        size = shape[0] * shape[1] * dtype.itemsize
        start, self._used = self._used, self._used + (size + 7) // 8 * 8  # a float64 starts at a multiple of 8
        return self.buffer[start : start + size].view(dtype).view(shape) if start + size <= len(self.buffer) else None
