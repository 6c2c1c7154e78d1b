"""The alias: modules named `grad_cache`, `grad_cache.loss` and so on, with names of this library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .._command import program_of

NAME = "grad_cache"
USAGE = """\
usage: python -m wholebatch.integrations.grad_cache -m MODULE [ARGUMENTS]
       python -m wholebatch.integrations.grad_cache SCRIPT.py [ARGUMENTS]

Runs a program whose imports of grad_cache give wholebatch's gradient caching and losses.
"""
_CACHING, _JAX = "wholebatch.integrations.grad_cache.caching", "wholebatch.jax"
_LOSSES = ("ContrastiveLossWithQueryClosure", "DistributedContrastiveLoss", "SimpleContrastiveLoss")
_TREES = ("tree_chunk", "tree_unchunk")
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "": (_CACHING, ("GradCache",)),
    "grad_cache": (_CACHING, ("GradCache", "RandContext")),
    "context_managers": (_CACHING, ("RandContext",)),
    "functional": ("wholebatch.gradcache", ("cached", "cat_input_tensor", "gather_input_tensor")),
    "loss": ("wholebatch.integrations.grad_cache.loss", _LOSSES),
    "pytorch_lightning": (_CACHING, ()),
    "pytorch_lightning.pl_gradcache": (_CACHING, ("PLGradCache",)),
    "cachex": (_JAX, ("cache_grad", "chunk_encode", "grad_cached", *_TREES, "unchunk_args")),
    "cachex.functional": (_JAX, ("cache_grad", "chunk_encode", "grad_cached", "unchunk_args")),
    "cachex.training": (_JAX, ("cache_grad", "cache_train_step", "chunk_encode", "unchunk_args")),
    "cachex.tree_utils": (_JAX, _TREES),
}
"""Their modules: the module of this library that has their names, which is imported with the first of them."""


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
    modules = {name: _Alias(name, *ours) for name, ours in MODULES.items()}
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        if name:
            setattr(modules[parent], last, module)
        sys.modules[module.__name__] = module


def start(argv: Sequence[str]) -> Callable[[], None]:
    """Return the program of the command."""
    install()
    return program_of(argv)


class _Alias(ModuleType):
    """A module of theirs, with names of a module of ours."""

    def __init__(self, name: str, ours: str, names: Sequence[str]) -> None:
        super().__init__(f"{NAME}.{name}".rstrip("."), f"An alias of {ours}.")
        self.__all__ = [*names]
        spec = find_spec(ours)
        self.__file__ = spec.origin if spec else None
        is_package = any(other.startswith(f"{name}.".lstrip(".")) for other in MODULES if other != name)
        self.__spec__ = ModuleSpec(self.__name__, None, origin=self.__file__, is_package=is_package)
        if is_package:
            self.__path__: list[str] = []  # no files: all modules are made here
        self._ours = ours

    def __getattr__(self, name: str) -> Any:
        if name in self.__all__:
            return getattr(import_module(self._ours), name)
        raise AttributeError(
            f"{self.__name__} is an alias made by wholebatch, which has no {name}; it has {', '.join(self.__all__)}"
        )

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]
