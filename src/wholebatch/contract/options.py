"""The options that every loss gives its caller; :func:`wholebatch.functional.clip_loss` describes them.

A loss's function ends its signature with `**options: Unpack[KernelOptions]`, or another type of those below. So their
names and types are declared here, once; type checkers and editors know them, and `with_named_options` shows them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

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

_P = ParamSpec("_P")
_R = TypeVar("_R")


@dataclass(eq=False)
class Options:
    """The options of one call; a loss without one of them leaves its default."""

    group: Group = None
    sync: Sync = "mean"
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


class BatchOptions(TypedDict, total=False):
    """The options of a call that computes no gradient, and of losses with other libraries' arguments."""

    group: Group
    exchange: ExchangeName
    memory: Memory
    precision: Precision


class SweepOptions(TypedDict, total=False):
    """The options of a loss that sweeps over S."""

    group: Group
    sync: Sync
    exchange: ExchangeName
    memory: Memory


class ProductOptions(SweepOptions, total=False):
    """The options of a loss whose sweep multiplies rows, in a precision that a caller may choose."""

    precision: Precision


class KernelOptions(ProductOptions, total=False):
    """The options of a loss with a sweep that kernels can compute."""

    kernel: Kernel


class DeferrableOptions(KernelOptions, total=False):
    """The options of such a loss whose checks need not wait for the device."""

    checks: Checking


_ALL = (BatchOptions, SweepOptions, ProductOptions, KernelOptions, DeferrableOptions)
_TYPES = {f"Unpack[{x.__name__}]": x for x in _ALL}


def with_named_options(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose signature names each option, with its default, where the source has `**options`."""
    signature = inspect.signature(function)
    *named, last = signature.parameters.values()
    if last.annotation in _TYPES:
        types: dict[str, Any] = _TYPES[last.annotation].__annotations__
        options = [
            inspect.Parameter(
                x.name, inspect.Parameter.KEYWORD_ONLY, default=x.default, annotation=types[x.name].__forward_arg__
            )
            for x in fields(Options)
            if x.name in types
        ]
        function.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return function
