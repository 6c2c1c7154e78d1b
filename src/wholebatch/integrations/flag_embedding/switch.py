"""Put the loss of the whole batch into FlagEmbedding's models, and run its programs with it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..._user_error import UserError
from .._framework import Framework
from .._run_target import target_of
from .loss import cross_device_loss

FLAG_EMBEDDING = Framework(
    "FlagEmbedding", ("1.4.2",), "pip install 'FlagEmbedding[finetune]>=1.4.2' 'transformers<5.20'"
)
PROGRAM = "python -m wholebatch.integrations.flag_embedding"
USAGE = f"""\
usage: {PROGRAM} -m MODULE OPTIONS OF FLAGEMBEDDING

Runs a program of FlagEmbedding with the loss of the whole batch. MODULE is, for example,
FlagEmbedding.finetune.embedder.encoder_only.base. Pass --negatives_cross_device True: without it, FlagEmbedding
compares the rows of each process alone, and nothing changes.
"""
_METHOD = "_compute_cross_device_neg_loss"

_log = logging.getLogger("wholebatch")
_replaced: list[Callable[..., Any]] = []


def enable() -> None:
    """Use :func:`cross_device_loss` in all models of FlagEmbedding in this process that have no such method themselves.

    A second call has no effect.

    Raises:
        ImportError: if FlagEmbedding is missing, too old, or has no such method.
    """
    model = _model_class()
    if not _replaced:
        _replaced.append(getattr(model, FLAG_EMBEDDING.seam(model, _METHOD)))
        setattr(model, _METHOD, cross_device_loss)


def disable() -> None:
    """Use FlagEmbedding's own loss again."""
    if _replaced:
        setattr(_model_class(), _METHOD, _replaced.pop())


def main(argv: Sequence[str]) -> int:
    """Run a program of FlagEmbedding with the loss of the whole batch.

    Args:
        argv: `-m`, the program's module, and its options.

    Returns:
        0.

    Raises:
        ImportError: if FlagEmbedding is missing or too old.
        ValueError: without `-m MODULE`.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    if argv[0] != "-m" or len(argv) < 2 or not argv[1].startswith("FlagEmbedding."):
        raise UserError(
            f"the first arguments must be -m and a module of FlagEmbedding, got {' '.join(argv[:2])!r}; pass for "
            "example -m FlagEmbedding.finetune.embedder.encoder_only.base"
        )
    enable()
    if not any(text.split("=")[0] in ("--negatives_cross_device", "--negatives-cross-device") for text in argv):
        _log.warning("without --negatives_cross_device True FlagEmbedding compares the rows of each process alone")
    before = sys.argv
    try:
        target_of(argv)()
    finally:
        sys.argv = before
        disable()
    return 0


def _model_class() -> Any:
    module = FLAG_EMBEDDING.load("FlagEmbedding.abc.finetune.embedder.AbsModeling")
    return getattr(module, FLAG_EMBEDDING.seam(module, "AbsEmbedderModel"))
