"""The options that every loss gives its caller."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .._checks import check_choice, check_memory
from ..comm import Group
from ..exchange import EXCHANGES, ExchangeName
from ..kernels import KERNELS, Kernel
from ..sweep import PRECISIONS, Memory, Precision
from ..sync import Sync, check_sync

Checking = Literal["entry", "deferred"]
CHECKING = ("entry", "deferred")
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = ("mean", "sum", "none")


@dataclass(eq=False)
class Options:
    """The options of one call; a loss without one of them leaves its default."""

    group: Group
    sync: Sync
    exchange: ExchangeName = "auto"
    memory: Memory = "auto"
    reduction: Reduction = "mean"
    kernel: Kernel = "auto"
    precision: Precision = "auto"
    checks: Checking = "entry"

    def check(self) -> None:
        """Raise ValueError unless each option exists; `group` is checked when the loss is called."""
        check_sync(self.sync)
        check_choice("exchange", self.exchange, EXCHANGES)
        check_memory(self.memory)
        check_choice("reduction", self.reduction, REDUCTIONS)
        check_choice("kernel", self.kernel, KERNELS)
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("checks", self.checks, CHECKING)
