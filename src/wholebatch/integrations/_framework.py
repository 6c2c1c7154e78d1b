"""Import a framework that an adapter needs, if its version is one that the adapter knows, and replace names in it.

A missing or too old framework raises an ImportError. Another version that was not tested is used, with a line in the
log, because most releases leave alone the names that an adapter replaces. If such a name is gone, the error has both
versions.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NamedTuple

_log = logging.getLogger("wholebatch")


class FrameworkError(ImportError):
    """A framework that is missing, too old, or without the name that an adapter replaces."""


class Framework(NamedTuple):
    """A framework, the versions that an adapter was tested with, and the command that installs it."""

    module: str
    versions: tuple[str, ...]
    """The tested versions, the oldest first: older ones are refused."""
    install: str

    @property
    def tested(self) -> str:
        """Return the tested versions in words."""
        *others, last = self.versions
        return f"{', '.join(others)} and {last}" if others else last

    def is_imported(self) -> bool:
        """Return whether the framework has been imported."""
        return sys.modules.get(self.module) is not None

    def is_older(self, release: str) -> bool:
        """Return whether the installed version is older than this one; a version without numbers is not."""
        return _numbers(self._release()) < _numbers(release)

    def check(self) -> None:
        """Raise FrameworkError if the framework has been imported, and is too old; for constructors."""
        if self.is_imported():
            self.load(self.module)

    def load(self, name: str) -> ModuleType:
        """Import one of the framework's modules; raise FrameworkError if it is missing, or the framework too old."""
        if self.is_older(self.versions[0]):
            raise FrameworkError(
                f"{self.module} {self._release()} is too old; this adapter was tested with {self.tested}: "
                f"{self.install}"
            )
        if _numbers(self._release()) not in [_numbers(""), *map(_numbers, self.versions)]:
            _log_once(
                f"{self.module} {self._release()} is used, but this adapter was tested with {self.tested}: "
                "check a first step with `wholebatch audit`"
            )
        return self._import(name)

    def find(self, module: str, name: str) -> Any:
        """Return a class or function of one of the framework's modules; raise FrameworkError as `load` and `seam`."""
        loaded = self.load(module)
        return getattr(loaded, self.seam(loaded, name))

    def seam(self, owner: Any, *names: str) -> str:
        """Return the first of the names that a module or a class of the framework has, or raise FrameworkError."""
        for name in names:
            if hasattr(owner, name):
                return name
        raise FrameworkError(
            f"{owner.__name__} of {self.module} {self._release()} has no {' and no '.join(names)}, where this "
            f"adapter puts its loss; it was tested with {self.tested}: {self.install}"
        )

    def _import(self, name: str) -> ModuleType:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise FrameworkError(
                f"{name} cannot be imported ({error}); this adapter was tested with {self.module} {self.tested}: "
                f"{self.install}"
            ) from error

    def _release(self) -> str:
        release = getattr(self._import(self.module), "__version__", None)
        if release is None:
            with suppress(PackageNotFoundError):
                release = version(self.module)
        return release or "of an unknown version"


# The versions of each framework, the oldest that is taken first; docs/integrations/index.md has them as a table.
OPEN_CLIP = Framework("open_clip", ("3.3.0", "4.2.0.dev0"), "pip install 'open_clip_torch[training]>=3.3'")
FLAG_EMBEDDING = Framework("FlagEmbedding", ("1.4.2",), "pip install 'FlagEmbedding>=1.4.2' 'transformers<5.20'")
LIGHTNING = Framework("lightning", ("2.6.6",), "pip install 'lightning>=2.6.6'")
MS_SWIFT = Framework("swift", ("4.6.0",), "pip install 'ms-swift>=4.6.0'")
METRIC_LEARNING = Framework("pytorch_metric_learning", ("2.9.0",), "pip install 'pytorch-metric-learning>=2.9'")
PYLATE = Framework("pylate", ("1.6.0",), "pip install pylate==1.6.0 --no-deps")  # which keeps torch as it is
SENTENCE_TRANSFORMERS = Framework(
    "sentence_transformers", ("6.0.0", "6.1.0", "6.2.0"), "pip install 'sentence-transformers[train]>=6.0'"
)
TEVATRON = Framework("tevatron", ("0.0.1 of July 2026",), "pip install . in a checkout of github.com/texttron/tevatron")
TRANSFORMERS = Framework("transformers", ("5.3.0", "5.24.0"), "pip install 'transformers[torch]>=5.3'")


Replacements = list[tuple[Any, dict[str, Any]]]  # modules, classes or dictionaries, and their new values by name


class Switch:
    """Names of a framework that are replaced, once, until they are restored; a decorator of their replacements."""

    def __init__(self, replacements: Callable[[], Replacements]) -> None:
        self._replacements, self._restore, self._enabled = replacements, ExitStack(), False

    def enable(self) -> bool:
        """Replace the names, and return True; return False if they are replaced already."""
        if self._enabled:
            return False
        for owner, ours in self._replacements():
            self._restore.enter_context(replaced(owner, ours))
        self._enabled = True
        return True

    def disable(self) -> None:
        """Restore the names."""
        self._restore.close()
        self._enabled = False


@contextmanager
def replaced(owner: Any, ours: dict[str, Any]) -> Iterator[None]:
    """Replace names of a module or a class, or entries of a dictionary, for a while."""
    read, write = (dict.__getitem__, dict.__setitem__) if isinstance(owner, dict) else (getattr, setattr)
    before = {name: read(owner, name) for name in ours}
    try:
        for name, value in ours.items():
            write(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            write(owner, name, value)


@cache
def _log_once(line: str) -> None:
    """Write a line to the log in this process, if it is a launcher's first."""
    if os.environ.get("RANK", "0") == "0":
        _log.warning(line)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release; a version without any counts as the newest.

    >>> _numbers("4.2.0.dev0") > _numbers("3.3")
    True
    """
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else (2**31,)
