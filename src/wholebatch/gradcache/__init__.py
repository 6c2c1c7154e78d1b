"""Gradient caching: the gradient of a batch that does not fit, with one parameter synchronization.

grad_cache        GradCache, the step              functional      cached, for loops of one's own
two_passes        forward, loss, forward again     keep            which chunks need no second pass
replay            what the second must repeat      parameter_sync  when engines may synchronize
inputs            trees of tensors, and models' calls
observe           which modules a call calls

passed_by         engines that hold parameters, and are not called
held              engines that are told to wait, and do not
replicas          parameters that ranks hold copies of, compared
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
