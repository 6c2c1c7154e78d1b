"""Packages that load their public names when one is asked for, so that importing the package imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .spelling import did_you_mean


def lazy_names(package: str, module: str, *more: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__`; submodules are loaded, too, when they are asked for.

    Args:
        package: its name.
        module: the name of its module that imports the public names, and lists them in `__all__`.
        more: further names of `__all__`, which the package itself defines.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return [*import_module(module, package).__all__, *more]
        if name.isidentifier() and not name.startswith("__"):
            if find_spec(f"{package}.{name}") is not None:
                return import_module(f".{name}", package)
            names = vars(import_module(module, package))
            if name in names:
                return vars(sys.modules[package]).setdefault(name, names[name])
        # programs try names with an underscore, and expect an error
        hint = "" if name.startswith("_") else did_you_mean(name, get("__all__"))
        raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")

    def list_names() -> list[str]:
        special = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(special | {*get("__all__")})

    return get, list_names
