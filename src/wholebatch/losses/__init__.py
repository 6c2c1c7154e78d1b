"""What is positive, what is excluded, which directions count; one loss per file."""

from .circle import CircleLoss
from .clip import CLIPLoss
from .dcl import DCLLoss
from .debiased import DebiasedLoss
from .info_nce import InfoNCELoss
from .multi_similarity import MultiSimilarityLoss
from .nt_xent import NTXentLoss
from .siglip import SigLIPLoss
from .statistics import BatchStatistics
from .sup_con import SupConLoss
from .whole_batch import WholeBatch

__all__ = [
    "BatchStatistics",
    "CLIPLoss",
    "CircleLoss",
    "DCLLoss",
    "DebiasedLoss",
    "InfoNCELoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SupConLoss",
    "WholeBatch",
]
