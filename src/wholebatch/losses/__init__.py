"""What is positive, what is excluded, which directions count; one loss per file."""

from .barlow_twins import BarlowTwinsLoss
from .circle import CircleLoss
from .clip import CLIPLoss
from .dcl import DCLLoss
from .debiased import DebiasedLoss
from .distillation import DistillationLoss
from .global_contrastive import GlobalContrastiveLoss
from .info_nce import InfoNCELoss
from .matryoshka import MatryoshkaLoss
from .moco import KeyQueue, MoCoLoss
from .multi_similarity import MultiSimilarityLoss
from .nt_xent import NTXentLoss
from .siglip import SigLIPLoss
from .smooth_ap import SmoothAPLoss
from .statistics import BatchStatistics
from .sup_con import SupConLoss
from .triplet import TripletLoss
from .vicreg import VICRegLoss
from .w_mse import WMSELoss
from .whole_batch import WholeBatch

__all__ = [
    "BarlowTwinsLoss",
    "BatchStatistics",
    "CLIPLoss",
    "CircleLoss",
    "DCLLoss",
    "DebiasedLoss",
    "DistillationLoss",
    "GlobalContrastiveLoss",
    "InfoNCELoss",
    "KeyQueue",
    "MatryoshkaLoss",
    "MoCoLoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SmoothAPLoss",
    "SupConLoss",
    "TripletLoss",
    "VICRegLoss",
    "WMSELoss",
    "WholeBatch",
]
