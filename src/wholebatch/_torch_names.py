"""The public names that need torch: all except `wholebatch.jax`. They are loaded when the first of them is used."""

import typing as _typing

from . import comm as comm
from . import functional as functional
from . import gradcache as gradcache
from . import heads as heads
from . import options as options
from . import partition as partition
from . import planning as planning
from . import recipes as recipes
from . import reference as reference
from . import terms as terms
from . import testing as testing
from .auditing._names import Problem as Problem
from .auditing._names import audit as audit
from .gradcache import GradCache as GradCache
from .heads import PartialFC as PartialFC
from .heads import SparseAdamW as SparseAdamW
from .heads import SparseSGD as SparseSGD
from .heads.margins import *  # noqa: F403
from .losses import *  # noqa: F403
from .pair_loss import *  # noqa: F403
from .planning._names import plan as plan
from .scale import Scale as Scale
from .tokens import Tokens as Tokens

if not _typing.TYPE_CHECKING:  # a type checker sees all; functional lists the functions
    __all__ = [name for name in globals() if not name.startswith("_") and not name.endswith("_loss")]
