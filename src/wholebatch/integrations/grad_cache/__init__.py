"""The names of the package `grad_cache`, and an alias, so that programs which import it get this library.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.grad_cache train.py --batch-size 1024

runs a program whose `from grad_cache import GradCache` then gives the class of this module. In a program of your own,
`import wholebatch.integrations.grad_cache.alias` does the same, before the first import of grad_cache.

caching     GradCache, PLGradCache, RandContext
loss        SimpleContrastiveLoss, DistributedContrastiveLoss, ContrastiveLossWithQueryClosure
install     the alias and the command; `alias` installs it when it is imported
"""

from ...gradcache import cached, cat_input_tensor, gather_input_tensor
from .caching import GradCache, PLGradCache, RandContext
from .install import USAGE as USAGE
from .install import install
from .install import start as start
from .loss import ContrastiveLossWithQueryClosure, DistributedContrastiveLoss, SimpleContrastiveLoss

__all__ = [
    "ContrastiveLossWithQueryClosure",
    "DistributedContrastiveLoss",
    "GradCache",
    "PLGradCache",
    "RandContext",
    "SimpleContrastiveLoss",
    "cached",
    "cat_input_tensor",
    "gather_input_tensor",
    "install",
]
