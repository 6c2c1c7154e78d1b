"""What is positive, what is excluded, which directions count: one loss per file, function first, module after."""

from .clip import CLIPLoss, clip_loss
from .whole_batch import WholeBatch

__all__ = ["CLIPLoss", "WholeBatch", "clip_loss"]
