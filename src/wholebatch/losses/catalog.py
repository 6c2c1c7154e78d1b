"""The catalog of losses: the planner, the benchmarks, the audit's presets and the trainer derive their choices from it.

Each entry is declared in the file of its loss; the catalog collects them.
"""

from __future__ import annotations

from importlib import import_module

from .._cli.declared_names import LOSS_NAMES
from ._declaration import Declaration as Declaration
from ._declaration import Sweep as Sweep

CATALOG: dict[str, Declaration] = {name: import_module(f".{name}", __package__).DECLARATION for name in LOSS_NAMES}
