"""The benchmarked losses, and the settings with which one is timed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from wholebatch.losses.catalog import CATALOG, Declaration
from wholebatch.sweep import default_side

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SUBJECTS: dict[str, Declaration] = {
    name: entry for name, entry in CATALOG.items() if entry.sweep is not None and entry.kind != "labeled"
}


@dataclass(frozen=True)
class Configuration:
    """The settings of a loss of this library."""

    keep: float = 0.0  # bytes for each entry of S, in addition to the two tiles of a flat sweep
    exchange: str = "auto"
    dtype: str = "float32"
    kernel: str = "auto"

    def label(self, ranks: int) -> str:
        """Return the settings that differ from the defaults, as text."""
        parts = [f"keep {self.keep:g} bytes/entry" if self.keep else "flat"]
        parts += [self.exchange] if ranks > 1 else []
        parts += [self.dtype] if self.dtype != "float32" else []
        parts += [self.kernel] if self.kernel != "auto" else []
        return " ".join(["wholebatch", *parts])

    @property
    def exchange_only(self) -> dict[str, Any]:
        """Return the arguments of a declared loss, which keeps nothing and has no kernels."""
        return {"exchange": self.exchange, "memory": "flat"}

    def options(self, entries: int, device: torch.device) -> dict[str, Any]:
        """Return the loss's arguments, for a rank that computes so many entries of S."""
        options = {"exchange": self.exchange, "kernel": self.kernel}
        if not self.keep:
            return {"memory": "flat", **options}
        tiles = 2 * DTYPES[self.dtype].itemsize * default_side(device) ** 2
        tiles *= 2 if DTYPES[self.dtype].itemsize == 2 else 1  # half precision is widened
        return {"memory": tiles + math.ceil(self.keep * entries), **options}
