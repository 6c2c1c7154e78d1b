"""The start of a run: its time, its step, its device and the versions of software."""

from __future__ import annotations

import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import torch

import wholebatch as wb
from wholebatch.app import processor_name

from .record import Start

_TIMEOUT_S = 10


def new_start(*, step: int, ranks: int, device: torch.device, plan: str, audit: str | None) -> Start:
    """Return the facts of a start at this moment."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()
    versions = f"wholebatch {wb.__version__}, Python {platform.python_version()}, torch {torch.__version__}"
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
    return Start(now, step, ranks, name, versions, _commit(), plan, audit)


def _commit() -> str | None:
    """Return the commit of this package's checkout, with + for local changes; None without a checkout or git."""
    folder = Path(__file__).parent
    outputs = []
    tracked = ["ls-files", "--error-unmatch", __file__]  # or the package is installed below another checkout
    for command in (tracked, ["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--", str(folder.parent)]):
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):  # no git, which is no error of the run
            return None
        if done.returncode:
            return None
        outputs.append(done.stdout.strip())
    return outputs[1] + ("+" if outputs[2] else "")
