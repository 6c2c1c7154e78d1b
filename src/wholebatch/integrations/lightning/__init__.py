"""Lightning and Fabric with a head whose classes are sharded over the ranks, `wholebatch.PartialFC`.

    from wholebatch.integrations.lightning import ddp_strategy

    Trainer(strategy=ddp_strategy(), devices=2).fit(module)

DDP gives all ranks the same parameters and the mean of their gradients. The ranks' parts of a head are different
classes, so both would be wrong. The strategies of this module are those of Lightning and Fabric, with four changes: DDP
leaves heads alone; the norm of a gradient that is clipped contains the parts of all ranks; all ranks skip a step after
an overflow, or none; and a checkpoint holds all classes, as one process would write it, for any number of ranks.
"""

from .strategies import ddp_strategy, fabric_ddp_strategy

__all__ = ["ddp_strategy", "fabric_ddp_strategy"]
