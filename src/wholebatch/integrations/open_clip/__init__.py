"""open_clip's trainer with this library's losses, and losses with open_clip's names and signatures.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.open_clip --model ViT-B-32 --train-data ...

The command takes the options of open_clip's trainer and runs it; only the loss is another. The losses alone, for a loop
of your own, need no open_clip.

losses       ClipLoss, SigLipLoss, CoCaLoss, DistillClipLoss
factory      create_loss and create_task: their factories choose, their options decide
trainer      runs open_clip_train.main with these factories, and with gradient caching inside its loop
"""

from .factory import create_loss, create_task
from .losses import ClipLoss, CoCaLoss, DistillClipLoss, SigLipLoss
from .trainer import main
from .trainer import start as start

__all__ = ["ClipLoss", "CoCaLoss", "DistillClipLoss", "SigLipLoss", "create_loss", "create_task", "main"]
