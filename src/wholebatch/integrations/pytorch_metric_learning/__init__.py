"""Losses and wrappers with the names and arguments of pytorch-metric-learning's, over the whole batch.

    from wholebatch.integrations.pytorch_metric_learning import DistributedLossWrapper

    loss_func = DistributedLossWrapper(TripletMarginLoss())

Their losses, distances, reducers, miners and trainers stay. The wrapper makes any of their losses exact on several
processes; each process computes all of it. Four losses are computed in tiles instead, without a matrix of all pairs.
They take, by keyword, distance, reducer, embedding_regularizer and embedding_reg_weight, which are theirs: the tiles
compute their defaults, and with another value their class computes the loss of the whole batch. `collect_stats` must
not be True. group, exchange, memory and precision are options of this library.

distributed  DistributedLossWrapper, DistributedMinerWrapper; SelfSupervisedLoss: two views of each example, no labels
losses       NTXentLoss, SupConLoss, MultiSimilarityLoss, CircleLoss
whole_batch  any loss of theirs on the rows of all processes
"""

from .distributed import DistributedLossWrapper, DistributedMinerWrapper, SelfSupervisedLoss
from .losses import CircleLoss, MultiSimilarityLoss, NTXentLoss, SupConLoss
from .whole_batch import MinedIndices

__all__ = [
    "CircleLoss",
    "DistributedLossWrapper",
    "DistributedMinerWrapper",
    "MinedIndices",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SelfSupervisedLoss",
    "SupConLoss",
]
