"""The dense, single-process, differentiable reference implementation of every loss: the standard of exactness.

Each takes the whole batch, stores the whole similarity matrix, and is short enough to be checked by eye against its
paper. Tests, docs and users call the same ones. Arguments mean the same as in `wholebatch.functional`; `ids` and
`weights` have one entry for each row of the whole batch.

    two_towers         images and texts
    retrieval          queries and keys
    late_interaction   queries and documents of several vectors each
    two_views          two views of each example
    labeled            examples with labels
    moments            means and covariances of two views
    classes            a classification head

Only shapes are checked. Values and options that `wholebatch.functional` refuses are computed with. Every function of
these files whose name ends in "_loss" is public here.
"""

import typing as _typing

from .classes import *  # noqa: F403
from .labeled import *  # noqa: F403
from .late_interaction import *  # noqa: F403
from .moments import *  # noqa: F403
from .retrieval import *  # noqa: F403
from .two_towers import *  # noqa: F403
from .two_views import *  # noqa: F403

if not _typing.TYPE_CHECKING:  # a type checker sees the names themselves
    __all__ = [name for name in globals() if name.endswith("_loss")]
