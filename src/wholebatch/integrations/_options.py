"""The options of this library that losses with other libraries' signatures have beside these libraries' arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..contract.options import BatchOptions, defaults_of, naming

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_options(**others: Any) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a constructor whose last parameter is `**options: Unpack[BatchOptions]`, or of a type derived from it.

    Its signature then names every option, it gets them all, and an unknown keyword raises TypeError.

    Args:
        others: the defaults of the options that the derived type adds.

    >>> @with_options()
    ... def options_of(loss, **options):
    ...     return options
    >>> inspect.signature(options_of)
    <Signature (loss, *, group=None, exchange='auto', memory='auto', precision='auto')>
    >>> options_of("a loss", memory="flat")
    {'group': None, 'exchange': 'auto', 'memory': 'flat', 'precision': 'auto'}
    """
    defaults = {**others, **defaults_of(BatchOptions)}

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        signature = naming(inspect.signature(function), defaults)

        @functools.wraps(function)
        def complete(*args: Any, **kwargs: Any) -> _R:
            unknown = [name for name in kwargs if name not in signature.parameters]
            if unknown:
                known = ", ".join(name for name in signature.parameters if name != "self")
                raise TypeError(
                    f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}; it takes {known}"
                )
            return function(*args, **{**defaults, **kwargs})

        complete.__signature__ = signature  # type: ignore[attr-defined]
        return complete

    return decorate
