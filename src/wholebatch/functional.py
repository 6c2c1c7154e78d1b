"""Every loss as a function. A module of the same name holds the settings of its function.

One L, of the rows of all ranks, is differentiated. Every rank must call `backward`, with the same incoming gradient (1,
or a loss scaler's factor) and in the same order among losses; if ranks differ, all raise ValueError. So skip a step on
all ranks or on none. The keyword options that losses share are described in `wholebatch.options`.
"""

import typing as _typing

from .heads import partial_fc_loss as partial_fc_loss
from .losses import *  # noqa: F403

if not _typing.TYPE_CHECKING:  # a type checker sees the names themselves
    __all__ = [name for name in globals() if name.endswith("_loss")]
