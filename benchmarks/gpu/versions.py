"""The card, the versions and the commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import torch

from .device import GPU, Row, has


def about() -> Iterator[Row]:
    """Yield versions, card and commit."""
    found: Row = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "numpy"):
        found[name] = version(name) if has(name) else None
    if GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "card": properties.name,
            "capability": torch.cuda.get_device_capability(),
            "sms": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "driver": _printed("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        }
    yield found | {"commit": _printed("git", "rev-parse", "HEAD")}


def _printed(*command: str) -> str | None:
    """Return the output of a program; None if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
