"""Losses with other libraries' arguments, declared once, in their order; options of this library come after them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from inspect import Parameter
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn
from typing_extensions import dataclass_transform

import wholebatch as wb

from .._base.checks import check_flag
from ..comm import Group
from ..contract.options import BatchOptions, defaults_of
from ..exchange import ExchangeName
from ..sweep import Memory, Precision

OPTIONS = defaults_of(BatchOptions)


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
    constructor of its own declares none.

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
    _options: ClassVar[Mapping[str, Any]] = OPTIONS

    def __init_subclass__(
        cls,
        positional: str | None = None,
        fixed: Mapping[str, Any] | None = None,
        options: tuple[str, ...] | None = None,
    ) -> None:
        super().__init_subclass__()
        own = {} if "__init__" in vars(cls) else _take_own(cls)
        cls._declared = _merged(cls, "_declared") | own
        cls._positional = [*cls._positional, *own] if positional is None else positional.split()
        cls._fixed = {**_merged(cls, "_fixed"), **(fixed or {})}
        cls._options = cls._options if options is None else {name: OPTIONS[name] for name in options}
        ordered = [name for name in cls._positional if name not in cls._fixed]
        keywords = [name for name in cls._declared if name not in cls._fixed and name not in ordered]
        parameters = [
            Parameter("self", Parameter.POSITIONAL_OR_KEYWORD),
            *(Parameter(x, Parameter.POSITIONAL_OR_KEYWORD, default=cls._declared[x]) for x in ordered),
            *(Parameter(x, Parameter.KEYWORD_ONLY, default=cls._declared[x]) for x in keywords),
            *(Parameter(x, Parameter.KEYWORD_ONLY, default=default) for x, default in cls._options.items()),
        ]
        if "__init__" not in vars(cls):
            cls.__init__ = _constructor(cls, inspect.Signature(parameters))  # type: ignore[method-assign]

    def prepare(self) -> None:
        """Check the arguments, which are attributes, and make what the loss needs."""

    @property
    def options(self) -> BatchOptions:
        """The options of this library that the loss takes."""
        options: Any = {name: getattr(self, name) for name in self._options}
        return options

    def choose_group(self, gathers: str) -> None:
        """Compare the rows of each process alone if the argument of this name is False, which no group goes with."""
        if check_flag(gathers, getattr(self, gathers)):
            return
        if self.group is not None:
            raise ValueError(
                f"{gathers}=False compares the rows of one process, so it does not go with group=; leave one of them "
                "out"
            )
        self.group = wb.comm.LocalCommunicator()

    def _take(self, arguments: dict[str, Any]) -> None:
        """Make arguments attributes."""
        super().__init__()
        for name, value in (arguments | dict(self._fixed)).items():
            setattr(self, name, value)
        self.prepare()


def _take_own(cls: type[AdaptedLoss]) -> dict[str, Any]:
    """Return the arguments that a class declares and their defaults, which no longer are class attributes."""
    declared: dict[str, Any] = {}
    for name, annotation in inspect.get_annotations(cls).items():
        if "ClassVar" not in str(annotation):
            declared[name] = vars(cls).get(name, Parameter.empty)
            if name in vars(cls):  # a class attribute would hide a module or a parameter of this name
                delattr(cls, name)
    return declared


def _merged(cls: type, name: str) -> dict[str, Any]:
    """Return the entries of the base classes' dictionaries of this name."""
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        merged |= vars(base).get(name, {})
    return merged


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
