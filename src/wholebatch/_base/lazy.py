"""Packages that load their public names when one is asked for, so that importing the package imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import Any


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
        raise AttributeError(f"module {package!r} has no attribute {name!r}{_hint(name, get)}")

    def list_names() -> list[str]:
        special = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(special | {*get("__all__")})

    return get, list_names


def _hint(name: str, get: Callable[[str], Any]) -> str:
    """Return the public name that is nearest to a misspelled one, as the end of an error."""
    if name.startswith("_"):  # programs try such names, and expect an error
        return ""
    spelling = {public.lower(): public for public in get("__all__")}
    similar = get_close_matches(name.lower(), spelling, n=1)
    return f"; did you mean {spelling[similar[0]]}?" if similar else ""
