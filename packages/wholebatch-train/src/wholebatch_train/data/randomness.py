"""Random numbers that depend on a key alone, not on the rank or on earlier draws."""

from __future__ import annotations

import zlib

import torch


def seeded(*key: int | str) -> torch.Generator:
    """Return a generator for this key, such as (seed, "order", pass)."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
