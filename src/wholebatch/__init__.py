"""Train with losses that need the whole batch: exact gradients, flat memory, any number of processes."""

from . import comm, functional, partition, reference, testing
from .losses import (
    BarlowTwinsLoss,
    BatchStatistics,
    CircleLoss,
    CLIPLoss,
    DCLLoss,
    DebiasedLoss,
    GlobalContrastiveLoss,
    InfoNCELoss,
    KeyQueue,
    MoCoLoss,
    MultiSimilarityLoss,
    NTXentLoss,
    SigLIPLoss,
    SupConLoss,
    TripletLoss,
    VICRegLoss,
    WholeBatch,
    WMSELoss,
)

__version__ = "0.1.0"

__all__ = [
    "BarlowTwinsLoss",
    "BatchStatistics",
    "CLIPLoss",
    "CircleLoss",
    "DCLLoss",
    "DebiasedLoss",
    "GlobalContrastiveLoss",
    "InfoNCELoss",
    "KeyQueue",
    "MoCoLoss",
    "MultiSimilarityLoss",
    "NTXentLoss",
    "SigLIPLoss",
    "SupConLoss",
    "TripletLoss",
    "VICRegLoss",
    "WMSELoss",
    "WholeBatch",
    "__version__",
    "comm",
    "functional",
    "partition",
    "reference",
    "testing",
]
