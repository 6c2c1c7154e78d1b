"""Losses with other libraries' arguments, declared once, in their order; options of this library come after them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from inspect import Parameter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from typing_extensions import dataclass_transform

import wholebatch as wb

from .._base.checks import check_flag
from ..comm import Group
from ..contract.options import BatchOptions, defaults_of
from ..exchange import ExchangeName
from ..losses._module import inherited, take_declared
from ..sweep import Memory, Precision


def _option(*, default: Any, kw_only: bool) -> Any:
    """Declare an argument with this default to type checkers."""
    return default


@dataclass_transform(eq_default=False, field_specifiers=(_option,))
class _Declared(nn.Module):
    """A module whose constructor takes the annotated attributes of its subclasses, as type checkers see it."""


class AdaptedLoss(_Declared):
    """A module whose annotated class attributes are the arguments of its constructor, and then its attributes.

        class ScaledLoss(AdaptedLoss):
            model: nn.Module
            scale: float = 20.0

    has the constructor `ScaledLoss(model, scale=20.0, *, group=None, exchange="auto", memory="auto", precision="auto")`
    with the options of this library, which `options` returns as a dictionary. Then `prepare` is called, which checks
    the arguments, and makes what the loss needs. An annotation with ClassVar declares no argument; a class with a
    constructor of its own declares none. With an argument gather_across_devices or gather_distributed, False compares
    the rows of each process alone.

    Keywords of a class statement:
        positional: the arguments that may be positional, in their order; others are then taken by keyword alone.
            Default: those of the base class, and then those that this class declares.
        fixed: arguments of a base class that this one does not take, with their values.
        options: the names of the options; default: as in the base class, all four in this one.
    """

    if TYPE_CHECKING:
        group: Group = _option(default=None, kw_only=True)
        exchange: ExchangeName = _option(default="auto", kw_only=True)
        memory: Memory = _option(default="auto", kw_only=True)
        precision: Precision = _option(default="auto", kw_only=True)

    _declared: ClassVar[Mapping[str, Any]] = {}
    _positional: ClassVar[Sequence[str]] = ()
    _fixed: ClassVar[Mapping[str, Any]] = {}
    _options: ClassVar[Mapping[str, Any]] = defaults_of(BatchOptions)

    def __init_subclass__(
        cls,
        positional: str | None = None,
        fixed: Mapping[str, Any] = MappingProxyType({}),
        options: tuple[str, ...] | None = None,
    ) -> None:
        super().__init_subclass__()
        own = {} if "__init__" in vars(cls) else take_declared(cls)
        cls._declared = inherited(cls, "_declared") | own
        cls._positional = [*cls._positional, *own] if positional is None else positional.split()
        cls._fixed = inherited(cls, "_fixed") | dict(fixed)
        if options is not None:
            cls._options = {name: AdaptedLoss._options[name] for name in options}
        taken = {name: default for name, default in cls._declared.items() if name not in cls._fixed}
        ordered = {name: taken.pop(name) for name in cls._positional if name in taken}
        either, keyword = Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY
        parameters = [Parameter("self", either)]
        for kind, arguments in ((either, ordered), (keyword, taken), (keyword, cls._options)):
            parameters += [Parameter(name, kind, default=default) for name, default in arguments.items()]
        if "__init__" not in vars(cls):
            cls.__init__ = _constructor(cls, inspect.Signature(parameters))  # type: ignore[method-assign]

    def _take(self, arguments: Mapping[str, Any]) -> None:
        """Make arguments attributes."""
        super().__init__()
        for name, value in {**arguments, **self._fixed}.items():
            setattr(self, name, value)
        for name in ("gather_across_devices", "gather_distributed"):
            if name in self._declared:
                self._choose_group(name)
        self.prepare()

    def prepare(self) -> None:
        """Check the arguments, which are attributes, and make what the loss needs."""

    @property
    def options(self) -> BatchOptions:
        """The options of this library that the loss takes."""
        options: Any = {name: getattr(self, name) for name in self._options}
        return options

    def _choose_group(self, gathers: str) -> None:
        """Compare the rows of each process alone if the argument of this name is False, which no group goes with."""
        if check_flag(gathers, getattr(self, gathers)):
            return
        if self.group is not None:
            raise ValueError(
                f"{gathers}=False compares the rows of one process, so it does not go with group=; leave one of them "
                "out"
            )
        self.group = wb.comm.LocalCommunicator()


def _constructor(cls: type[AdaptedLoss], signature: inspect.Signature) -> Any:
    """Return a constructor with this signature."""

    def __init__(self: AdaptedLoss, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        known = [*signature.parameters][1:]
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            raise TypeError(
                f"{cls.__name__}.__init__() got an unexpected keyword argument {unknown[0]!r}; it takes "
                f"{', '.join(known)}"
            )
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        self._take({name: bound.arguments[name] for name in known})

    __init__.__qualname__ = f"{cls.__qualname__}.__init__"
    __init__.__signature__ = signature  # type: ignore[attr-defined]
    return __init__


def check_no_progress_bar(value: bool) -> None:
    """Raise ValueError for a progress bar."""
    if value:
        raise ValueError(
            "show_progress_bar must be False, got True: chunks have no progress bar; the trainer's own shows steps"
        )
