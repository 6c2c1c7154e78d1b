"""The public losses: each file decides which entries of S are positive, which are excluded, which directions count.

Every loss is a function and a module that holds its settings. `wholebatch` and `wholebatch.functional` take their names
from this list, and a loss with a DECLARATION needs no other.
"""

import typing as _typing

from .alignment_uniformity import AlignmentUniformityLoss as AlignmentUniformityLoss
from .alignment_uniformity import alignment_uniformity_loss as alignment_uniformity_loss
from .barlow_twins import BarlowTwinsLoss as BarlowTwinsLoss
from .barlow_twins import barlow_twins_loss as barlow_twins_loss
from .circle import CircleLoss as CircleLoss
from .circle import circle_loss as circle_loss
from .clip import CLIPLoss as CLIPLoss
from .clip import clip_loss as clip_loss
from .dcl import DCLLoss as DCLLoss
from .dcl import dcl_loss as dcl_loss
from .debiased import DebiasedLoss as DebiasedLoss
from .debiased import debiased_loss as debiased_loss
from .distillation import DistillationLoss as DistillationLoss
from .distillation import distillation_loss as distillation_loss
from .document_scores import TopDocuments as TopDocuments
from .document_scores import max_sim as max_sim
from .global_contrastive import GlobalContrastiveLoss as GlobalContrastiveLoss
from .global_contrastive import LossAndAverages as LossAndAverages
from .global_contrastive import global_contrastive_loss as global_contrastive_loss
from .info_nce import InfoNCELoss as InfoNCELoss
from .info_nce import info_nce_loss as info_nce_loss
from .key_queue import KeyQueue as KeyQueue
from .late_interaction import MaxSimLoss as MaxSimLoss
from .late_interaction import max_sim_loss as max_sim_loss
from .matryoshka import MatryoshkaLoss as MatryoshkaLoss
from .matryoshka import matryoshka_loss as matryoshka_loss
from .moco import MoCoLoss as MoCoLoss
from .moco import moco_loss as moco_loss
from .multi_similarity import MultiSimilarityLoss as MultiSimilarityLoss
from .multi_similarity import multi_similarity_loss as multi_similarity_loss
from .nt_xent import NTXentLoss as NTXentLoss
from .nt_xent import nt_xent_loss as nt_xent_loss
from .siglip import SigLIPLoss as SigLIPLoss
from .siglip import siglip_loss as siglip_loss
from .smooth_ap import SmoothAPLoss as SmoothAPLoss
from .smooth_ap import smooth_ap_loss as smooth_ap_loss
from .statistics import BatchStatistics as BatchStatistics
from .statistics import LossAndStatistics as LossAndStatistics
from .statistics import with_statistics as with_statistics
from .sup_con import SupConLoss as SupConLoss
from .sup_con import sup_con_loss as sup_con_loss
from .triplet import TripletLoss as TripletLoss
from .triplet import triplet_loss as triplet_loss
from .vicreg import VICRegLoss as VICRegLoss
from .vicreg import vicreg_loss as vicreg_loss
from .w_mse import WMSELoss as WMSELoss
from .w_mse import w_mse_loss as w_mse_loss
from .whole_batch import WholeBatch as WholeBatch

if not _typing.TYPE_CHECKING:  # a type checker sees the names themselves
    __all__ = [
        name
        for name in sorted(globals())
        if name[0].isupper() or name.endswith("_loss") or name in ("max_sim", "with_statistics")
    ]
