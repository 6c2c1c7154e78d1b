"""The planner: predict memory, time and bytes sent of a step before it runs."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._names import *  # noqa: F403
else:  # the command line parses its options without torch
    from .._base.lazy import lazy_names

    __getattr__, __dir__ = lazy_names(__name__, "._names")
