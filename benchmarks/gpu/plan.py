"""The planner on this device: `wholebatch plan --measure` without its command line, which needs tyro."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import wholebatch as wb
from wholebatch.planning.check import check, rates_here
from wholebatch.planning.shapes import Shapes

from .device import DEVICE, GPU, Row

_CHECK_S = 10.0 if GPU else 0.5  # of each setting
_PLANS: tuple[tuple[torch.dtype, tuple[dict[str, Any], ...]], ...] = (  # by the dtype of features
    (
        torch.bfloat16,
        (
            {"loss": "clip", "batch_size": 32768, "embedding_size": 512},
            {"loss": "partial_fc", "batch_size": 4096, "embedding_size": 512, "classes": 200_000, "sample_rate": 0.1},
        ),
    ),
    (torch.float32, ({"loss": "clip", "batch_size": 16384, "embedding_size": 768},)),
)
_SMALL = ((torch.float32, ({"loss": "clip", "batch_size": 512, "embedding_size": 64},)),)


def plan() -> Iterator[Row]:
    """Calibrate, and yield each setting that fits, its predicted and its measured time and memory."""
    for dtype, plans in _PLANS if GPU else _SMALL:
        losses: Any = tuple(sizes["loss"] for sizes in plans)
        rates = rates_here(losses, 1, dtype=dtype, device=DEVICE.type)
        print(rates.to_json())
        for sizes in plans:
            found = wb.plan(**sizes, dtype=dtype, device=DEVICE.type, rates=rates)
            print(found)
            shapes = Shapes(
                sizes["loss"], sizes["batch_size"], sizes["embedding_size"], 1, dtype, DEVICE.type,
                sizes.get("classes", 0), sizes.get("sample_rate", 1.0),
            )  # fmt: skip
            for memory in dict.fromkeys(option.memory for option in found.options if option.fits):
                one = check(shapes, "gather", memory, rates, within_s=_CHECK_S)
                yield {
                    **sizes,
                    "batch_size": one.shapes.batch_size,  # a half, a quarter, ... where all would take too long
                    "dtype": str(dtype).removeprefix("torch."),
                    "memory": one.memory,
                    "predicted_bytes": one.predicted_bytes,
                    "bytes": one.bytes,
                    "error_of_bytes": None if one.bytes is None else one.predicted_bytes / one.bytes - 1,
                    "predicted_seconds": one.predicted_seconds,
                    "seconds": one.seconds,
                    "error_of_seconds": one.predicted_seconds / one.seconds - 1,
                }
