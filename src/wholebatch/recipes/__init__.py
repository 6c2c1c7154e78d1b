"""Losses from papers as declarations of a few lines: to call as they are, or to copy and change.

retrieval      InfoNCE whose negatives are chosen: by task, by document, by near duplicates, mined ones of each query
guided         false negatives by a guide: GISTEmbed
distillation   a teacher's scores of each query's own documents: listwise, and by margins
soft_labels    targets from labels that examples share
triplets       semi-hard negatives
memory         rows of earlier batches as further columns: cross-batch memory
uniformity     how evenly rows cover the sphere
towers         three and more kinds of data, some of them missing
statistics     no losses over pairs, but sums over all ranks: FLOPS, SIGReg
parts          scores, masks and row losses that several of them share

A recipe of a loss over pairs returns a :class:`wholebatch.PairLoss`, so a call takes its arguments, and `reference` is
the same formula on one dense matrix.
"""

from .distillation import listwise_distillation, margin_mse
from .guided import guided_info_nce
from .memory import RowMemory, memory_sup_con
from .retrieval import distinct_document_info_nce, mined_info_nce, near_duplicate_info_nce, same_task_info_nce
from .soft_labels import soft_label_info_nce
from .statistics import flops_loss, sigreg_loss
from .towers import TowersLoss
from .triplets import semi_hard_triplet
from .uniformity import uniformity

__all__ = [
    "RowMemory",
    "TowersLoss",
    "distinct_document_info_nce",
    "flops_loss",
    "guided_info_nce",
    "listwise_distillation",
    "margin_mse",
    "memory_sup_con",
    "mined_info_nce",
    "near_duplicate_info_nce",
    "same_task_info_nce",
    "semi_hard_triplet",
    "sigreg_loss",
    "soft_label_info_nce",
    "uniformity",
]
