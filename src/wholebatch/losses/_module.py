"""Modules that hold the settings of a loss, declared once, as annotated class attributes.

    class CircleLoss(SweepLoss):
        m: float = 0.4
        gamma: float = 80.0

makes a module whose constructor takes `m` and `gamma` by keyword, beside the options of every loss. Editors and type
checkers know their types and defaults (`typing.dataclass_transform`). `forward` calls the loss's function with
`settings`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from typing_extensions import dataclass_transform

from .._base.checks import check_ignore_index, check_temperature
from .._base.spelling import did_you_mean
from ..comm import Group
from ..comm.modules import built
from ..comm.select import check_group
from ..contract import Checking, Options, Reduction
from ..contract.options import with_named_options
from ..exchange import ExchangeName
from ..kernels import Kernel
from ..sweep import Memory, Precision
from ..sync import Sync

_OPTIONS = ("exchange", "memory", "reduction", "kernel", "precision", "checks")
_REQUIRED = inspect.Parameter.empty


def inherited(cls: type, name: str) -> dict[str, Any]:
    """Return the entries of the base classes' dictionaries of this name."""
    merged: dict[str, Any] = {}
    for base in reversed(cls.__mro__[1:]):
        merged |= vars(base).get(name, {})
    return merged


def take_declared(cls: type) -> dict[str, Any]:
    """Return the annotated attributes of a class and their defaults, and delete these: they would hide parameters."""
    annotations = inspect.get_annotations(cls)
    names = [name for name, annotation in annotations.items() if "ClassVar" not in str(annotation)]
    declared = {name: vars(cls).get(name, _REQUIRED) for name in names}
    for name in names:
        if name in vars(cls):
            delattr(cls, name)
    return declared


@dataclass_transform(kw_only_default=True, eq_default=False)
class Settings(nn.Module):
    """A module whose annotated class attributes are the keyword arguments of its constructor.

    A subclass may name a function that checks some of them, by their names: `class CircleLoss(SweepLoss, check=...)`.
    """

    def __init_subclass__(cls, check: Callable[..., object] | None = None) -> None:
        super().__init_subclass__()
        if check is not None:
            cls._further_check = staticmethod(check)
        cls._declared = declared = inherited(cls, "_declared") | take_declared(cls)
        parameters = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY, default=d) for n, d in declared.items()]
        if "__init__" in vars(cls):
            parameters = [*with_named_options(vars(cls)["__init__"]).parameters.values()][1:]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, **settings: Any) -> None:  # typed by the declarations of each subclass
        super().__init__()
        self._number = next(built)
        for name, value in self._complete(settings).items():
            value = tuple(value) if isinstance(value, list) else value
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.check()

    _further_check: Any = staticmethod(lambda: None)
    if TYPE_CHECKING:
        _declared: Any  # a dict of defaults by name

    @classmethod
    def _complete(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return all settings in the order of their declaration, defaults included."""
        names = list(cls._declared)
        for name in settings:
            if name not in names:
                in_call = inspect.signature(cls.forward).parameters
                hint = did_you_mean(name, names) or "; check the spelling"
                if name in in_call:
                    hint = f"; pass {name} in the call"
                elif name == "temperature" and "logit_scale" in in_call:
                    hint = "; pass logit_scale=1 / temperature, in the constructor or in the call"
                elif name == "logit_scale" and "temperature" in names:
                    hint = "; pass temperature=1 / logit_scale"
                raise TypeError(
                    f"{cls.__name__} got an unexpected keyword argument {name!r}; its settings are "
                    f"{', '.join(sorted(names))}{hint}"
                )
        complete = {**cls._declared, **settings}
        missing = [name for name, value in complete.items() if value is _REQUIRED]
        if missing:
            raise TypeError(f"{cls.__name__} needs {', '.join(missing)}; pass by keyword")
        return complete

    @property
    def settings(self) -> dict[str, Any]:  # of the types that a subclass declares
        """The keyword arguments of every call of the loss's function."""
        return {name: getattr(self, name) for name in self._declared}

    def check(self) -> None:
        """Raise ValueError unless the settings are valid, as far as can be known before a call."""
        names = inspect.signature(self._further_check).parameters
        self._further_check(**{name: value for name, value in self.settings.items() if name in names})

    def extra_repr(self) -> str:
        shown = {name: value for name, value in self.settings.items() if name != "group"}
        shown = {name: value for name, value in shown.items() if not isinstance(value, nn.Module)}  # listed below
        return ", ".join(f"{name}={_shown(value)}" for name, value in shown.items())


class LossModule(Settings):
    """The settings of every loss."""

    group: Group = None
    sync: Sync = "mean"
    checks: Checking = "entry"

    @property
    def options(self) -> Options:
        """The options of a call, as the settings are now; those that the loss has not keep their defaults."""
        settings = self.settings
        return Options(self.group, self.sync, **{name: settings[name] for name in _OPTIONS if name in settings})

    def check(self) -> None:
        """Raise ValueError unless the settings are valid; subclasses check their further settings."""
        check_group(self.group)
        settings = self.settings
        self.options.check()
        if settings.get("ignore_index") is not None:
            check_ignore_index(settings["ignore_index"])
        if "temperature" in settings:
            check_temperature("temperature", settings["temperature"])
        super().check()


class SweepLoss(LossModule):
    """The settings of a loss that sweeps over S."""

    reduction: Reduction = "mean"
    exchange: ExchangeName = "auto"
    memory: Memory = "auto"


class ProductLoss(SweepLoss):
    """The settings of a loss whose sweep multiplies rows, in a precision that a caller may choose."""

    precision: Precision = "auto"


class KernelLoss(ProductLoss):
    """The settings of a loss with a sweep that kernels can compute."""

    kernel: Kernel = "auto"


def _shown(value: object) -> str:
    """Return the text of a setting; never that of a sharded tensor's value, which only all ranks together can read."""
    if not isinstance(value, Tensor):
        return repr(value)
    if value.numel() == 1 and type(value) in (Tensor, nn.Parameter) and value.device.type != "meta":
        return f"{value.item():g}"
    return f"{type(value).__name__} of shape {tuple(value.shape)}"
