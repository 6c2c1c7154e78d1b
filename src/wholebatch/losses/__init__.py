"""The public losses: each file decides which entries of S are positive, which are excluded, which directions count.

Every loss is a function and a module that holds its settings. `wholebatch` and `wholebatch.functional` take their names
from this list.
"""

from .alignment_uniformity import AlignmentUniformityLoss, alignment_uniformity_loss
from .barlow_twins import BarlowTwinsLoss, barlow_twins_loss
from .circle import CircleLoss, circle_loss
from .clip import CLIPLoss, clip_loss
from .dcl import DCLLoss, dcl_loss
from .debiased import DebiasedLoss, debiased_loss
from .distillation import DistillationLoss, distillation_loss
from .document_scores import TopDocuments, max_sim
from .global_contrastive import GlobalContrastiveLoss, LossAndAverages, global_contrastive_loss
from .info_nce import InfoNCELoss, info_nce_loss
from .key_queue import KeyQueue
from .late_interaction import MaxSimLoss, max_sim_loss
from .matryoshka import MatryoshkaLoss, matryoshka_loss
from .moco import MoCoLoss, moco_loss
from .multi_similarity import MultiSimilarityLoss, multi_similarity_loss
from .nt_xent import NTXentLoss, nt_xent_loss
from .siglip import SigLIPLoss, siglip_loss
from .smooth_ap import SmoothAPLoss, smooth_ap_loss
from .statistics import BatchStatistics, LossAndStatistics, with_statistics
from .sup_con import SupConLoss, sup_con_loss
from .triplet import TripletLoss, triplet_loss
from .vicreg import VICRegLoss, vicreg_loss
from .w_mse import WMSELoss, w_mse_loss
from .whole_batch import WholeBatch

__all__ = [
    "AlignmentUniformityLoss",
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
    "LossAndAverages",
    "LossAndStatistics",
    "MatryoshkaLoss",
    "MaxSimLoss",
    "MoCoLoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SmoothAPLoss",
    "SupConLoss",
    "TopDocuments",
    "TripletLoss",
    "VICRegLoss",
    "WMSELoss",
    "WholeBatch",
    "alignment_uniformity_loss",
    "barlow_twins_loss",
    "circle_loss",
    "clip_loss",
    "dcl_loss",
    "debiased_loss",
    "distillation_loss",
    "global_contrastive_loss",
    "info_nce_loss",
    "matryoshka_loss",
    "max_sim",
    "max_sim_loss",
    "moco_loss",
    "multi_similarity_loss",
    "nt_xent_loss",
    "siglip_loss",
    "smooth_ap_loss",
    "sup_con_loss",
    "triplet_loss",
    "vicreg_loss",
    "w_mse_loss",
    "with_statistics",
]
