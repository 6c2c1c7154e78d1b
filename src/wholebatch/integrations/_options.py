"""Constructors with other libraries' arguments: their order, the options of this library beside them, common checks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, TypeVar

import wholebatch as wb

from .._base.checks import check_flag
from ..comm import Group
from ..contract.options import BatchOptions, defaults_of, naming

_F = TypeVar("_F", bound=Callable[..., Any])


def with_options(**others: Any) -> Callable[[_F], _F]:
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
    return lambda function: _bind(naming(inspect.signature(function), defaults), function)


def with_arguments(constructor: Callable[..., Any], order: str, **added: Any) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a constructor that gets by keyword all arguments of another one, and added ones with these defaults.

    To type checkers the result takes any arguments.

    Args:
        constructor: the other constructor; those of its keywords that are not in the order come last.
        order: the names, "*" before the first that must be a keyword. Others that may be positional are left out.
        added: defaults.

    >>> @with_arguments(lambda self, a, b=2, *, c=3: None, "a d", d=4)
    ... def arguments_of(self, **arguments):
    ...     return arguments
    >>> inspect.signature(arguments_of), arguments_of("self", 1, 5)
    (<Signature (self, a, d=4, *, c=3)>, {'a': 1, 'd': 5, 'c': 3})
    """
    known = {**inspect.signature(constructor).parameters}
    known |= {name: Parameter(name, Parameter.KEYWORD_ONLY, default=default) for name, default in added.items()}
    positional, _, keywords = (f"self {order}").partition("*")
    parameters = [known.pop(name).replace(kind=Parameter.POSITIONAL_OR_KEYWORD) for name in positional.split()]
    parameters += [known.pop(name) for name in keywords.split()]
    parameters += [x for x in known.values() if x.kind in (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)]
    return lambda function: _bind(inspect.Signature(parameters), function)


def _bind(signature: inspect.Signature, function: Any) -> Any:
    """Return a function with this signature that passes each argument by its name, with defaults."""
    takes_any = any(x.kind is Parameter.VAR_KEYWORD for x in signature.parameters.values())

    @functools.wraps(function)
    def complete(*args: Any, **kwargs: Any) -> Any:
        unknown = [name for name in kwargs if name not in signature.parameters]
        if unknown and not takes_any:
            known = ", ".join(name for name in signature.parameters if name != "self")
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}; it takes {known}"
            )
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(**dict(zip(signature.parameters, bound.args, strict=False)), **bound.kwargs)

    complete.__signature__ = signature  # type: ignore[attr-defined]
    return complete


def check_no_progress_bar(value: bool) -> None:
    """Raise ValueError for a progress bar."""
    if value:
        raise ValueError(
            "show_progress_bar must be False, got True: chunks have no progress bar; the trainer's own shows steps"
        )


def group_of_batch(name: str, gathers: bool, group: Group) -> Group:
    """Return the processes whose rows are compared, in frameworks that compare those of one process by default.

    `name` is the framework's name of the argument `gathers`; False beside a group raises ValueError.
    """
    if not check_flag(name, gathers) and group is not None:
        raise ValueError(
            f"{name}=False compares the rows of one process, so it does not go with group=; leave one of them out"
        )
    return group if gathers else wb.comm.LocalCommunicator()
