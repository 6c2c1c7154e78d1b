"""The catalog of losses: the planner, the benchmarks, the audit's presets and the trainer derive their choices from it.

Each entry is declared in the file of its loss; the catalog collects them.
"""

from __future__ import annotations

from importlib import import_module

from .._loss_names import LOSS_NAMES
from ._entry import Entry as Entry
from ._entry import Sweep as Sweep

CATALOG: dict[str, Entry] = {name: import_module(f".{name}", __package__).ENTRY for name in LOSS_NAMES}
