"""Losses from papers as declarations of a few lines: to call as they are, or to copy and change.

same_task      InfoNCE whose negatives come from the query's own task
soft_labels    targets from labels that examples share
semi_hard      triplets with semi-hard negatives
distillation   a teacher's scores of each query's own documents: listwise, and by margins
cross_batch    rows of earlier batches as further columns
towers         three and more kinds of data, some of them missing
statistics     no losses over pairs, but sums over all ranks: FLOPS, SIGReg

All are called like the losses of :mod:`wholebatch`: settings in the constructor, then features and data of their rows
by the names of the paper. `reference` takes the same arguments, and computes the same formula on one dense matrix.
"""

from .cross_batch import CrossBatchSupConLoss
from .distillation import ListwiseDistillationLoss, MarginMSELoss
from .same_task import SameTaskInfoNCELoss
from .semi_hard import SemiHardTripletLoss
from .soft_labels import SoftLabelCLIPLoss
from .statistics import FLOPSLoss, SIGRegLoss
from .towers import TowersLoss

__all__ = [
    "CrossBatchSupConLoss",
    "FLOPSLoss",
    "ListwiseDistillationLoss",
    "MarginMSELoss",
    "SIGRegLoss",
    "SameTaskInfoNCELoss",
    "SemiHardTripletLoss",
    "SoftLabelCLIPLoss",
    "TowersLoss",
]
