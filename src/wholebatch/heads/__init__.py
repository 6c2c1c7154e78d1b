"""Softmax over classes whose centers are sharded over the ranks (PartialFC), and its margins."""

import typing as _typing

from .checkpoint import load_head as load_head
from .checkpoint import save_head as save_head
from .gradients import agree_on_overflow as agree_on_overflow
from .gradients import clip_grad_norm_ as clip_grad_norm_
from .insightface import load_insightface as load_insightface
from .margins import *  # noqa: F403
from .margins import Margin as Margin
from .margins import Targets as Targets
from .optim import SparseAdamW as SparseAdamW
from .optim import SparseSGD as SparseSGD
from .partial_fc import PartialFC as PartialFC
from .partial_fc_loss import partial_fc_loss as partial_fc_loss
from .top_classes import TopClasses as TopClasses

if not _typing.TYPE_CHECKING:  # a type checker sees the names themselves
    from .margins import __all__ as _margins

    __all__ = [  # noqa: PLE0604
        *_margins,
        "Margin",
        "PartialFC",
        "SparseAdamW",
        "SparseSGD",
        "Targets",
        "TopClasses",
        "agree_on_overflow",
        "clip_grad_norm_",
        "load_head",
        "load_insightface",
        "partial_fc_loss",
        "save_head",
    ]
