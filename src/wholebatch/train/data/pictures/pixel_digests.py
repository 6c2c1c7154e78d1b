"""Digests of the pixels of pictures, by which equal ones are found without holding them in memory."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..feed import prepared
from ..sides import Side

_READ = 256  # pictures that are read at a time


class PixelDigests:
    """Digests of the pixels of a side's pictures; each picture is read once, however often it is asked for.

    Args:
        pictures: the side.
        workers: processes that read them.
    """

    def __init__(self, pictures: Side, *, workers: int = 0) -> None:
        self._read, self._workers = _Read(pictures), workers
        self._known: dict[int, bytes] = {}

    def of(self, rows: Tensor) -> list[bytes]:
        """Return the digests of these rows (n,), equal for pictures with equal pixels, size and mode."""
        missing = torch.tensor([row for row in dict.fromkeys(rows.tolist()) if row not in self._known])
        if len(missing):
            parts = [*missing.split(_READ)]
            for part, digests in zip(parts, prepared(self._read, parts, workers=self._workers), strict=True):
                self._known |= zip(part.tolist(), digests, strict=True)
        return [self._known[row] for row in rows.tolist()]


@dataclass(frozen=True)
class _Read:
    """Reads pictures and returns their digests; it runs in a worker."""

    pictures: Side

    def __call__(self, rows: Tensor) -> list[bytes]:
        return [_digest(picture) for picture in self.pictures.items(rows)]


def _digest(picture: Any) -> bytes:
    found = hashlib.sha256(f"{picture.mode} {picture.size}".encode())
    found.update(picture.tobytes())
    return found.digest()
