"""Gradient caching: the gradient of a batch whose activations do not fit, with one parameter synchronization per step.

grad_cache          GradCache and its arguments; ranks agree that their calls are valid
encode              representations of one model, for a loss of the caller's
functional          `cached` and other decorators, for a caller's own loop

step                the two passes of a step
step_loss           its loss, whose backward pass the step makes, or a caller
passes              forward over all chunks; forward again, and backward
one_pass            one forward pass with a graph, its comparison with the first, and one backward pass
chunks              encoders, and the chunks of their batches
join                all rows of a representation, from those of its chunks
kept_graphs         which chunks keep their graph, and need no second pass
replay              random numbers, autocast and buffers are the same in both passes
same_parameters     parameters are the same in both passes, and their copies on all ranks
agreement           if one rank raises, all ranks raise, with gradients as they were
observe             which modules a model refers to, and which it calls

inputs/             cuts a model's input into the parts of chunks
engines/            keeps DDP, FSDP and DeepSpeed from synchronizing in each pass
outer_engine        encoders that are called inside the engine's forward pass
"""

from .encode import encode
from .engines.known import register_sync_control
from .engines.sync_control import SyncControl
from .functional import cached, cat_input_tensor, gather_input_tensor
from .grad_cache import GradCache
from .inputs.multimodal import MultimodalSplit
from .inputs.parts import InputChunk
from .inputs.token_budget import TokenBudget, TokenChunk

__all__ = [
    "GradCache",
    "InputChunk",
    "MultimodalSplit",
    "SyncControl",
    "TokenBudget",
    "TokenChunk",
    "cached",
    "cat_input_tensor",
    "encode",
    "gather_input_tensor",
    "register_sync_control",
]
