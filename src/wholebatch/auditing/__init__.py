"""The audit: compare the final gradient of several ranks with that of one process, and find the causes of differences.

Real processes run the user's training step. Causes are told apart by measurements: how each rank's loss depends on each
rank's rows, which calls of a model received a gradient, and the losses of batches on which a mistake of one kind has no
effect.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._names import *  # noqa: F403
else:  # the command line parses its options without torch
    from .._base.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, "._names")
