"""Train with losses that need the whole batch: exact gradients, flat memory, any number of processes."""

from . import comm, functional, partition, reference, testing
from .losses import (
    BatchStatistics,
    CircleLoss,
    CLIPLoss,
    DCLLoss,
    DebiasedLoss,
    InfoNCELoss,
    MultiSimilarityLoss,
    NTXentLoss,
    SigLIPLoss,
    SupConLoss,
    WholeBatch,
)

__version__ = "0.1.0"

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
    "__version__",
    "comm",
    "functional",
    "partition",
    "reference",
    "testing",
]
