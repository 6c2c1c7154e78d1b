"""Problems for the audit: losses with pytorch-metric-learning's names and with lightly's, under DDP."""

import wholebatch as wb
from wholebatch.auditing.presets.encoders import labeled, two_views
from wholebatch.integrations import lightly
from wholebatch.integrations import pytorch_metric_learning as pml

UNEVEN = {"uneven": True, "empty": True}


def sup_con() -> wb.Problem:
    return labeled(pml.SupConLoss(), **UNEVEN)


def nt_xent_of_classes() -> wb.Problem:
    return labeled(pml.NTXentLoss(), **UNEVEN)


def multi_similarity() -> wb.Problem:
    return labeled(pml.MultiSimilarityLoss(), **UNEVEN)


def circle() -> wb.Problem:
    return labeled(pml.CircleLoss(gamma=8), **UNEVEN)


def triplets() -> wb.Problem:
    from pytorch_metric_learning.losses import TripletMarginLoss

    return labeled(pml.DistributedLossWrapper(TripletMarginLoss(margin=0.2)), **UNEVEN)


def views() -> wb.Problem:
    return two_views(pml.SelfSupervisedLoss(pml.NTXentLoss()), **UNEVEN)


def nt_xent() -> wb.Problem:
    return two_views(lightly.NTXentLoss(), **UNEVEN)


def dcl() -> wb.Problem:
    return two_views(lightly.DCLLoss(), **UNEVEN)


def dclw() -> wb.Problem:
    return two_views(lightly.DCLWLoss(), **UNEVEN)


def barlow_twins() -> wb.Problem:
    return two_views(lightly.BarlowTwinsLoss(), **UNEVEN)


def vicreg() -> wb.Problem:
    return two_views(lightly.VICRegLoss(), **UNEVEN)
