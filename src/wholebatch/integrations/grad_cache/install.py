"""The alias: modules named `grad_cache`, `grad_cache.loss` and so on, with the names of this package."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from . import cachex, context_managers, functional, grad_cache, lightning, loss

NAME = "grad_cache"
_HERE = {
    "": (grad_cache, ["GradCache"]),
    "grad_cache": (grad_cache, grad_cache.__all__),
    "context_managers": (context_managers, context_managers.__all__),
    "functional": (functional, [*functional.__all__]),
    "loss": (loss, loss.__all__),
    "pytorch_lightning": (lightning, []),
    "pytorch_lightning.pl_gradcache": (lightning, lightning.__all__),
    **{name: (cachex, [*names]) for name, names in cachex.NAMES.items()},
}  # their modules


def install() -> None:
    """Let `import grad_cache`, and imports of its modules, give the names of this package from now on.

    A package grad_cache that is installed is hidden, not changed. A second call has no effect.

    Raises:
        ImportError: if another grad_cache has been imported before: somebody may hold its classes already.
    """
    present = sys.modules.get(NAME)
    if isinstance(present, _Alias):
        return
    found = sorted(name for name in sys.modules if (name == NAME or name.startswith(f"{NAME}.")) and sys.modules[name])
    if found:
        path = getattr(present, "__file__", None) or found[0]
        raise ImportError(
            f"another grad_cache has been imported before ({path}), and its classes may be in use; put "
            "`import wholebatch.integrations.grad_cache.alias` before the first import of grad_cache, or start the "
            "program with python -m wholebatch.integrations.grad_cache",
            name=NAME,
        )
    modules = {name: _Alias(name, *here) for name, here in _HERE.items()}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if name:
            setattr(modules[parent], last, module)
        sys.modules[module.__name__] = module


class _Alias(ModuleType):
    """A module of theirs, with names of a module of ours."""

    def __init__(self, name: str, ours: ModuleType, names: Iterable[str]) -> None:
        super().__init__(f"{NAME}.{name}".rstrip("."), f"An alias of {ours.__name__}.")
        self.__all__ = [*names]
        self.__file__ = ours.__file__
        is_package = any(other.startswith(f"{name}.".lstrip(".")) for other in _HERE if other != name)
        self.__spec__ = ModuleSpec(self.__name__, None, origin=ours.__file__, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []  # no files: all modules are made here
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        if name in self.__all__:
            return getattr(self._ours, name)
        raise AttributeError(
            f"{self.__name__} is an alias made by wholebatch, which has no {name}; it has {', '.join(self.__all__)}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]
