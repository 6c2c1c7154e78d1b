"""Facts about this machine that need no torch."""

from __future__ import annotations

import platform
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def processor_name() -> str:
    """Return the name of this machine's processor, where the system tells it, or else its architecture."""
    lines = _CPUINFO.read_text().splitlines() if _CPUINFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
