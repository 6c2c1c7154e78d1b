"""Gradient caching: the gradient of a batch that does not fit, with one parameter synchronisation.

grad_cache        GradCache, the step              functional      cached, for loops of one's own
two_passes        forward, loss, forward again     keep            which chunks need no second pass
replay            what the second must repeat      parameter_sync  when engines may synchronise
inputs            trees of tensors, and models' calls
"""

from .functional import cached, cat_input_tensor, gather_input_tensor
from .grad_cache import GradCache
from .parameter_sync import SyncControl, register_sync_control

__all__ = [
    "GradCache",
    "SyncControl",
    "cached",
    "cat_input_tensor",
    "gather_input_tensor",
    "register_sync_control",
]
