"""Import a framework that an adapter needs, if its version is one that the adapter knows.

A missing or too old framework raises an ImportError. A version newer than the tested ones is used silently, because
most releases leave alone the names that an adapter replaces. If such a name is gone, `seam` raises an error with both
versions.
"""

from __future__ import annotations

import importlib
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import NamedTuple


class FrameworkError(ImportError):
    """A framework that is missing, too old, or without the name that an adapter replaces."""


class Framework(NamedTuple):
    """A framework, the versions that an adapter was tested with, and the command that installs it.

    >>> Framework("json", ("2.0.9",), "pip install json").tested
    '2.0.9'
    """

    module: str
    versions: tuple[str, ...]
    """The tested versions, the oldest first: older ones are refused."""
    install: str

    @property
    def tested(self) -> str:
        """Return the tested versions in words."""
        return " and ".join(self.versions)

    def load(self, name: str) -> ModuleType:
        """Import one of the framework's modules.

        Raises:
            FrameworkError: if the framework, or a package that the module imports, is missing, or if the framework is
                older than the tested versions.
        """
        installed = self._installed(self._import(self.module))
        if _numbers(installed) < _numbers(self.versions[0]):
            raise FrameworkError(
                f"{self.module} {installed} is too old; this adapter was tested with {self.tested}: {self.install}"
            )
        return self._import(name)

    def seam(self, module: ModuleType, *names: str) -> str:
        """Return the first of the names that the module has, at which the adapter enters.

        Raises:
            FrameworkError: if it has none of them.
        """
        for name in names:
            if hasattr(module, name):
                return name
        installed = self._installed(self._import(self.module))
        raise FrameworkError(
            f"{module.__name__} of {self.module} {installed} has no {' and no '.join(names)}, where this adapter puts "
            f"its loss; it was tested with {self.tested}: {self.install}"
        )

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise FrameworkError(
                f"{name} cannot be imported ({error}); this adapter was tested with {self.module} {self.tested}: "
                f"{self.install}"
            ) from error

    def _installed(self, top: ModuleType) -> str:
        found = getattr(top, "__version__", None)
        if found is None:
            with suppress(PackageNotFoundError):
                found = version(self.module)
        return found or "of an unknown version"


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; a version without any counts as the newest.

    >>> _numbers("4.2.0.dev0") > _numbers("3.3")
    True
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (2**31,)
