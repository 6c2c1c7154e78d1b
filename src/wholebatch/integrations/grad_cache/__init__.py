"""The names of the package `grad_cache`, and an alias, so that programs which import it get this library.

    torchrun --nproc-per-node 8 -m wholebatch.integrations.grad_cache train.py --batch-size 1024

runs a program whose `from grad_cache import GradCache` then gives the class of this module. In a program of your own,
`import wholebatch.integrations.grad_cache.alias` does the same, before the first import of grad_cache.

grad_cache          GradCache
loss                SimpleContrastiveLoss, DistributedContrastiveLoss, ContrastiveLossWithQueryClosure
functional          cached, cat_input_tensor, gather_input_tensor
context_managers    RandContext
lightning           PLGradCache
cachex              the functions for JAX
install             the alias; `alias` installs it when it is imported
"""

from .context_managers import RandContext
from .functional import cached, cat_input_tensor, gather_input_tensor
from .grad_cache import GradCache
from .install import install
from .lightning import PLGradCache
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
