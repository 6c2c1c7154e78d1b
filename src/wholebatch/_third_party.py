"""Other libraries: which are installed, and what they need to be imported beside a CPU build of torch."""

from __future__ import annotations

import importlib.metadata
import warnings

import torch


def version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_LIBRARIES: list[torch.library.Library] = []  # what they declare lasts as long as they do


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a CPU build of torch, which its compiled operators do not fit.

    Three peers import torchvision for their models. It refuses to load without the operators that it describes; the
    losses never call them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision  # noqa: F401
        except RuntimeError:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _LIBRARIES.append(library)
