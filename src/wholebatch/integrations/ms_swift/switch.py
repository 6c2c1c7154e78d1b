"""Put the loss of the whole batch into ms-swift's table of losses."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from .._framework import Framework, FrameworkError
from .loss import InfonceLoss

MS_SWIFT = Framework("swift", ("4.6.0",), "pip install 'ms-swift>=4.6.0'")
_NAME = "infonce"

_log = logging.getLogger("swift")  # ms-swift's own, which prints in its first process
_replaced: list[type] = []


def enable() -> None:
    """Use :class:`InfonceLoss` for `--loss_type infonce` in this process, in trainers that are made from now on.

    A second call has no effect.

    Raises:
        ImportError: if ms-swift is missing, too old, or has no such loss.
    """
    losses = _losses()
    if not _replaced:
        _replaced.append(losses[_NAME])
        losses[_NAME] = InfonceLoss
        _log.info("--loss_type %s is computed by wholebatch, over the rows of all processes", _NAME)


def disable() -> None:
    """Use ms-swift's own loss again."""
    if _replaced:
        _losses()[_NAME] = _replaced.pop()


def plugin_path() -> str:
    """Return the path of the file for ms-swift's `--external_plugins`, which calls :func:`enable`."""
    return str(Path(__file__).parent / "plugin" / "wholebatch_infonce.py")


def _losses() -> dict[str, Any]:
    module = MS_SWIFT.load("swift.loss")
    losses: dict[str, Any] = getattr(module, MS_SWIFT.seam(module, "loss_map"))
    if _NAME not in losses:
        raise FrameworkError(
            f"swift.loss.loss_map has no {_NAME!r}, which this adapter replaces; it was tested with {MS_SWIFT.tested}: "
            f"{MS_SWIFT.install}"
        )
    return losses
