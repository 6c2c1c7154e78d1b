"""The names of the losses with a standard call, without importing torch: a command line needs them before it runs.

A loss `losses/<name>.py` with a line `DECLARATION = ...` is in the catalog under its file's name.
"""

from __future__ import annotations

import re
from pathlib import Path

LOSS_NAMES: tuple[str, ...] = tuple(
    path.stem
    for path in sorted((Path(__file__).parent / "losses").glob("[!_]*.py"))
    if re.search(r"^DECLARATION = ", path.read_text(encoding="utf-8"), re.MULTILINE)
)
