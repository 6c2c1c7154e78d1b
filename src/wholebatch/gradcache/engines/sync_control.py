"""The switch of an engine that synchronizes gradients, such as DDP.

A step makes a backward pass for every chunk, and an engine would synchronize in each. So its switch is turned off,
except for the last chunk of its module. Engines read their switches at different times:

    engine                       switch                                read                    passes
    DDP                          no_sync()                             in the forward pass     each rank makes its own
    FSDP2 (fully_shard)          set_requires_gradient_sync(False)     in the backward pass    collective
    FSDP1 and so on              no_sync()                             in the backward pass    collective

Passes are collective if an engine gathers parameters for them: then all ranks must make the same passes. A switch that
the caller has turned off stays off; where the engine reads it in the forward pass, it counts as it was in the caller's.

An engine of another kind reduces all passes inside a context together, when the context ends (`coalesce`). Then nothing
is held, and all of a step's passes stand inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from ..._base.checks import check_callable, check_choice, check_flag

_CALLABLE = ("matches", "hold", "coalesce", "remember", "check", "state", "awaits", "is_off", "resume", "hides")


@dataclass(frozen=True)
class SyncControl:
    """The switch of an engine, which keeps it from synchronizing gradients in each of a step's backward passes.

    Args:
        matches: returns whether a module is one of this engine's.
        hold: returns a context in which the module's passes leave gradients on their rank. All passes but the
            module's last are in it.
        coalesce: instead of `hold`: returns a context in which all of a step's passes are made, and at whose end the
            engine reduces their sum. If a rank has failed, it ends with an error on all ranks, and reduces nothing.
        decides: the pass in which the engine reads its switch.
        hides: returns whether the hooks of the module's parameters must not run in held passes, in which gradients are
            then added to `.grad` without autograd's accumulation. None: they may.
        is_off: for a switch that the engine reads in the forward pass: returns whether the caller has turned it off.
        resume: returns a context in which that switch is on, whatever it is outside. None: it is as it is.
        collective: whether all ranks have to make the same passes.
        remember: saves gradients that the engine keeps outside `.grad` until it synchronizes, and returns a function
            that restores them. None: all gradients are in the parameters' `.grad`.
        check: raises ValueError if the module's settings do not allow several backward passes.
        state: returns a value that is another one after the engine has changed the module's parameters. None: these
            are in `parameters()`, and show it by their versions.
        awaits: returns the parameters without whose gradients the engine does not finish its synchronization. Those
            that the last backward pass does not reach get zeros in it. None: it finishes anyway.
        sharded: whether each rank holds a part of the module's parameters, so that they are not compared.
    """

    matches: Callable[[nn.Module], bool]
    hold: Callable[[Any], AbstractContextManager[None]] | None = None  # takes a module of the registered class
    decides: Literal["forward", "backward"] = "backward"
    collective: bool = True
    remember: Callable[[Any], Callable[[], None]] | None = None  # likewise
    check: Callable[[Any], None] | None = None  # likewise
    state: Callable[[Any], object] | None = None  # likewise
    awaits: Callable[[Any], Iterable[Tensor]] | None = None  # likewise
    sharded: bool = False
    coalesce: Callable[[Any], AbstractContextManager[None]] | None = None  # likewise
    is_off: Callable[[Any], bool] | None = None  # likewise
    resume: Callable[[Any], AbstractContextManager[None]] | None = None  # likewise
    hides: Callable[[Any], bool] | None = None  # likewise

    def __post_init__(self) -> None:
        for name in _CALLABLE:
            if getattr(self, name) is not None or name == "matches":
                check_callable(name, getattr(self, name))
        if (self.hold is None) == (self.coalesce is None):
            got = "neither" if self.hold is None else "both"
            raise ValueError(
                f"hold or coalesce must be given, one of them, got {got}: hold keeps gradients on their rank in all "
                "passes but the last, coalesce stands around all passes and reduces at its end"
            )
        check_choice("decides", self.decides, ("forward", "backward"))
        check_flag("collective", self.collective)
        check_flag("sharded", self.sharded)


def no_sync(module: Any) -> AbstractContextManager[None]:
    """Return the module's `no_sync()`, the switch of most engines."""
    held: AbstractContextManager[None] = module.no_sync()
    return held


_MISSING = object()


@contextmanager
def with_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Set attributes of an object inside; afterward it has those that it had."""
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
