"""Raise on every rank if one rank's call does not fit the signature.

Python refuses a missing or an unknown argument before the first line of a function runs. The rank that made the mistake
would then never enter the handshake in which the other ranks wait. So collective functions bind their arguments
themselves, and send an error in the handshake.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

from .._base.spelling import did_you_mean

_P = ParamSpec("_P")
_R = TypeVar("_R")


class CallError(TypeError):
    """The arguments of a call do not fit the function's signature."""


def bound(
    function: Callable[_P, _R], refuse: Callable[[CallError, tuple[Any, ...], dict[str, Any]], object]
) -> Callable[_P, _R]:
    """Return a function that calls `refuse(error, args, kwargs)` where its arguments do not fit the signature.

    `refuse` raises on all ranks, in a handshake; if it returns, the error is raised on this rank alone.
    """
    signature = inspect.signature(function)
    names, takes_any = signature.parameters.keys(), any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        mistake = None
        if not takes_any and not kwargs.keys() <= names:  # a function with `**options` would accept options of others
            mistake = mistake_of(signature, args, kwargs)
        if mistake is None:
            try:
                return function(*args, **kwargs)
            except TypeError:  # of this call, before the function ran, or of something inside the function
                mistake = mistake_of(signature, args, kwargs)
                if mistake is None:
                    raise
        refuse(mistake, args, kwargs)
        raise mistake from None

    return call


def mistake_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallError | None:
    """Return the error of arguments that do not fit the signature, None if they fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hints = f"{_by_keyword(signature, args, kwargs)}{_unknown(signature, kwargs, str(error))}"
        return CallError(f"{error}{hints}; the signature is {_shown(signature)}")
    return None


def missing_error(function: Callable[..., Any], names: Sequence[str], fix: str) -> CallError:
    """Return the error of a call that leaves out these arguments, which the signature alone does not require."""
    listed = ", ".join(map(repr, names))
    argument = "a required argument" if len(names) == 1 else "required arguments"
    return CallError(f"missing {argument}: {listed}; {fix}; the signature is {_shown(inspect.signature(function))}")


def _by_keyword(signature: inspect.Signature, args: Sequence[object], kwargs: Iterable[str]) -> str:
    """Return a part of a message that names the first keyword-only argument, if there are too many positional ones."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    places = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
    if len(args) <= places or inspect.Parameter.KEYWORD_ONLY not in kinds:
        return ""
    names = [x.name for x in signature.parameters.values() if x.kind is x.KEYWORD_ONLY and x.name not in kwargs]
    return f"; pass the others by keyword, as in {names[0]}=..." if names else ""


def _unknown(signature: inspect.Signature, kwargs: Iterable[str], known: str) -> str:
    """Return a part of a message that names unknown keywords with their nearest name, if it says more than `known`."""
    names = [name for name, parameter in signature.parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
    if len(names) < len(signature.parameters):
        return ""
    hints = []
    for name in kwargs:
        if name not in names:
            meant = did_you_mean(name, names, cutoff=0.75)
            if meant or repr(name) not in known:
                hints.append(f"; unknown: {name!r}{meant}")
    return "".join(hints)


def complaint(error: Exception) -> Callable[[], NoReturn]:
    """Return the `state` of a handshake that makes every rank raise this error."""

    def state() -> NoReturn:
        raise error

    return state


def _shown(signature: inspect.Signature) -> str:
    """Return the names of the parameters, those with a default as `name=...`."""
    empty = inspect.Parameter.empty
    parameters = [
        parameter.replace(annotation=empty, default=empty if parameter.default is empty else ...)
        for name, parameter in signature.parameters.items()
        if name != "self"
    ]
    return str(inspect.Signature(parameters)).replace("=Ellipsis", "=...")
