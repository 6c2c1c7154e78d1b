"""Problems that are audited by name: recipes that circulate, and the settings of installed libraries.

A preset is a module with SETTINGS, a factory for each setting. Encoders and batches are small; losses, and training
loops where a library has one, are the installed library's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..._base.third_party import version
from ..._base.user_error import UserError

if TYPE_CHECKING:  # it imports torch
    from ..problem import Problem

PACKAGES: dict[str, tuple[str, ...]] = {
    "recipes": (),
    "open_clip": ("open_clip_torch",),
    "sentence_transformers": ("sentence-transformers",),
    "pylate": ("pylate",),
    "colpali": ("colpali-engine", "accelerate"),
    "transformers": ("transformers", "accelerate"),
    "ms_swift": ("ms-swift", "accelerate"),
    "lightly": ("lightly",),
    "pml": ("pytorch-metric-learning",),
    "flag_embedding": ("FlagEmbedding",),
    "lightning": ("lightning",),
    "nvidia": (),
    "wholebatch": (),
}


def check_installed(name: str) -> None:
    """Raise UserError if there is no such preset, or its packages are not installed."""
    if name not in PACKAGES:
        raise UserError(f"there is no preset {name!r}; choose one of: {', '.join(PACKAGES)}")
    missing = [package for package in PACKAGES[name] if version(package) is None]
    if missing:
        raise UserError(f"preset {name!r} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def settings(name: str) -> Mapping[str, Callable[[], Problem]]:
    """Return a preset's factories by setting.

    Raises:
        UserError: if there is no such preset, or its packages are not installed.
    """
    check_installed(name)
    factories: Mapping[str, Callable[[], Problem]] = importlib.import_module(module_name(name)).SETTINGS
    return factories


def versions(name: str) -> dict[str, str]:
    """Return the versions of a preset's installed packages."""
    versions = {package: version(package) for package in PACKAGES[name]}
    return {package: v for package, v in versions.items() if v is not None}


def installed() -> list[str]:
    """Return the presets whose packages are installed."""
    return [name for name, packages in PACKAGES.items() if len(versions(name)) == len(packages)]


def module_name(name: str) -> str:
    """Return the name of a preset's module."""
    return f"{__name__}.{name}"
