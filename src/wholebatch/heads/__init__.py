"""Softmax over classes whose centers are sharded over the ranks (PartialFC), and its margins."""

from .checkpoint import load_head, save_head
from .gradients import agree_on_overflow, clip_grad_norm_
from .insightface import load_insightface
from .margins import (
    AdaFace,
    ArcFace,
    CombinedMargin,
    CosFace,
    CurricularFace,
    MagFace,
    Margin,
    NormFace,
    SphereFace,
    Targets,
)
from .optim import SparseAdamW, SparseSGD
from .partial_fc import PartialFC
from .partial_fc_loss import partial_fc_loss
from .top_classes import TopClasses

__all__ = [
    "AdaFace",
    "ArcFace",
    "CombinedMargin",
    "CosFace",
    "CurricularFace",
    "MagFace",
    "Margin",
    "NormFace",
    "PartialFC",
    "SparseAdamW",
    "SparseSGD",
    "SphereFace",
    "Targets",
    "TopClasses",
    "agree_on_overflow",
    "clip_grad_norm_",
    "load_head",
    "load_insightface",
    "partial_fc_loss",
    "save_head",
]
