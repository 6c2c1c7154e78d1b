r"""FlagEmbedding's trainers with a loss of the whole batch, where `--negatives_cross_device True` asks for it.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.flag_embedding \
        -m FlagEmbedding.finetune.embedder.encoder_only.base --negatives_cross_device True ...

In a program of your own, call `enable()` once before training. FlagEmbedding lets each process compute the loss of all
rows with the gradient of its own rows, and DDP then averages: the gradient is 1/W of the true one. Here it is the
gradient that one process computes from the whole batch.

loss        the loss of all processes, for FlagEmbedding's models
switch      puts it instead of theirs, and runs their program
"""

from .loss import cross_device_loss
from .switch import disable, enable, main

__all__ = ["cross_device_loss", "disable", "enable", "main"]
