"""Other libraries: their installed versions, and operators that make them importable with a CPU build of torch."""

from __future__ import annotations

import importlib.metadata
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_LIBRARIES: list[torch.library.Library] = []  # their declarations live as long as these objects


def declare_torchvision_operators() -> None:
    """Declare torchvision's compiled operators where they do not load, so that torchvision can be imported.

    They do not load with a CPU build of torch. Three peers import torchvision for their models; their losses never call
    these operators. Without torchvision this does nothing.
    """
    if version("torchvision") is None:
        return
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
