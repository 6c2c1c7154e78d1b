"""Decorators of the functions that a user calls on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from .._base.autograd import outside_graphs, without_autocast
from ..comm import Group, select_communicator
from ..comm.binding import CallError, bound, complaint
from ..comm.modules import numbered
from .in_graph import traced
from .options import with_named_options

_REASON = (
    "wholebatch runs this outside the compiled graph. Losses go inside, unless they return anything but one tensor, "
    "have sparse gradients (PartialFC that draws classes), or take an object that the compiled function makes"
)
_FIXES = {  # keywords that losses with a logit scale have elsewhere
    "temperature": "pass logit_scale=1 / temperature",
    "output_dict": "the losses in wholebatch.integrations.open_clip have open_clip's signature",
}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def entry(loss: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate the entry of a loss.

    In a compiled training step the loss is one operator of the graph, which runs it as without the compiler; what
    cannot be one breaks the graph. Autocast is off inside, because the sums of a loss need their full precision; its
    dtype is remembered for the products of the loss. Arguments that do not fit the signature, which names each of the
    loss's options, raise on every rank.
    """
    signature = with_named_options(loss)
    loss.__signature__ = signature  # type: ignore[attr-defined]
    run = without_autocast(bind_on_all_ranks(numbered(loss) if "self" in signature.parameters else loss))
    return outside_graphs(run, _REASON, traced if signature.return_annotation in (Tensor, "Tensor") else None)


def bind_on_all_ranks(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorate a function that is collective over its `group`, or over a module's: a wrong call raises on all ranks."""
    return bound(function, lambda error, args, kwargs: _refuse(function, error, args, kwargs))


def _refuse(function: Callable[..., object], error: CallError, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise the error of a call that does not fit its signature, on all ranks of the group that was given."""
    caller, names = function.__qualname__, inspect.signature(function).parameters
    if "logit_scale" in names:
        unknown = {*kwargs} - {*names}
        error = CallError("; ".join([str(error), *(fix for name, fix in _FIXES.items() if name in unknown)]))
    elif "logit_scale" in kwargs and ("temperature" in names or hasattr(next(iter(args), None), "temperature")):
        error = CallError(f"{error}; this loss has a temperature instead, 1 / logit_scale")
    module = next((x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)), None)
    options = getattr(module, "options", module)
    raise_on_all_ranks(caller, error, kwargs.get("group", getattr(options, "group", None)))


def prepared(caller: str, group: Group, prepare: Callable[[], _R]) -> _R:
    """Return what a preparation of arguments returns; if it raises on one rank, all ranks raise in its handshake.

    A preparation that succeeds sends nothing: the others are in the first handshake of the loss, which must come next.
    """
    try:
        return prepare()
    except Exception as error:  # whatever it is, the other ranks must not wait
        state = complaint(error)
    select_communicator(group).handshake(state, caller=caller)
    raise AssertionError("a handshake with an error raises")


def raise_on_all_ranks(caller: str, error: CallError, group: Any) -> None:
    """Raise the error of a wrong call on all ranks of the group that was given; return if it is no group."""
    try:
        comm = select_communicator(group)
    except ValueError:  # an invalid group: there are no other ranks to report to
        return
    comm.handshake(complaint(error), caller=caller)
