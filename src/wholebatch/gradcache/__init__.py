"""Gradient caching: the gradient of a batch that does not fit, with one parameter synchronization.

grad_cache        GradCache, the arguments         functional      cached, for a caller's loop
step              the two passes of a step         agreement       ranks go on together, or raise together
first_pass        forward, without graphs          rollback        gradients as before a step that failed
second_pass       forward again, and backward      one_pass        forward with a graph, and the comparison
chunks            encoders and their chunks        keep            which chunks need no second pass
inputs            trees of tensors, models' calls  replay          the conditions of the first pass, again

observe           which modules a call calls       parameter_sync  when engines may synchronize
passed_by         engines that hold parameters, and are not called
held              engines that do not wait when they should
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
