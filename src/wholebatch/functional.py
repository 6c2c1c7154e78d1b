"""Every loss as a function. A module of the same name holds the settings of its function."""

import typing as _typing

from .heads import partial_fc_loss as partial_fc_loss
from .losses import *  # noqa: F403

if not _typing.TYPE_CHECKING:  # a type checker sees the names themselves
    __all__ = [name for name in globals() if name.endswith("_loss")]
