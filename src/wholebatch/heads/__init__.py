"""Softmax over classes whose centers are sharded over the ranks (PartialFC), and its margins."""

import typing as _typing

from .checkpoint import load_head as load_head
from .checkpoint import save_head as save_head
from .clip_and_overflow import agree_on_overflow as agree_on_overflow
from .clip_and_overflow import clip_grad_norm_ as clip_grad_norm_
from .insightface import load_insightface as load_insightface
from .margins import *  # noqa: F403
from .margins.interface import Margin as Margin
from .margins.interface import NegativeTransform as NegativeTransform
from .margins.interface import ObservesAngles as ObservesAngles
from .margins.interface import ObservesNorms as ObservesNorms
from .margins.interface import Regularizes as Regularizes
from .margins.interface import Targets as Targets
from .margins.interface import TransformsNegatives as TransformsNegatives
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
        "NegativeTransform",
        "ObservesAngles",
        "ObservesNorms",
        "PartialFC",
        "Regularizes",
        "SparseAdamW",
        "SparseSGD",
        "Targets",
        "TopClasses",
        "TransformsNegatives",
        "agree_on_overflow",
        "clip_grad_norm_",
        "load_head",
        "load_insightface",
        "partial_fc_loss",
        "save_head",
    ]
