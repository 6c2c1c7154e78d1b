"""Every loss as a function; the modules only hold its settings."""

from .heads.partial_fc_loss import partial_fc_loss
from .losses.barlow_twins import barlow_twins_loss
from .losses.circle import circle_loss
from .losses.clip import clip_loss
from .losses.dcl import dcl_loss
from .losses.debiased import debiased_loss
from .losses.distillation import distillation_loss
from .losses.global_contrastive import global_contrastive_loss
from .losses.info_nce import info_nce_loss
from .losses.matryoshka import matryoshka_loss
from .losses.moco import moco_loss
from .losses.multi_similarity import multi_similarity_loss
from .losses.nt_xent import nt_xent_loss
from .losses.siglip import siglip_loss
from .losses.smooth_ap import smooth_ap_loss
from .losses.sup_con import sup_con_loss
from .losses.triplet import triplet_loss
from .losses.vicreg import vicreg_loss
from .losses.w_mse import w_mse_loss

__all__ = [
    "barlow_twins_loss",
    "circle_loss",
    "clip_loss",
    "dcl_loss",
    "debiased_loss",
    "distillation_loss",
    "global_contrastive_loss",
    "info_nce_loss",
    "matryoshka_loss",
    "moco_loss",
    "multi_similarity_loss",
    "nt_xent_loss",
    "partial_fc_loss",
    "siglip_loss",
    "smooth_ap_loss",
    "sup_con_loss",
    "triplet_loss",
    "vicreg_loss",
    "w_mse_loss",
]
