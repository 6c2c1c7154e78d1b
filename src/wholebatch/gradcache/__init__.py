"""Gradient caching: the gradient of a batch whose activations do not fit, with one parameter synchronization per step.

grad_cache          GradCache and its arguments
encode              representations of one model, for a loss of the caller's
functional          `cached` and other decorators, for a caller's own loop

entry               ranks agree that their calls are valid
step                the two passes of a step
immediate           a step that makes its own backward pass
deferred            a step whose second passes are made in the backward pass of a caller
first_pass          forward, without graphs
second_pass         forward again, and backward
backward            one backward pass, seen by the chunk's engines or hidden from them
one_pass            one forward pass with a graph; compares the second pass with the first
chunks              encoders, and the chunks of their batches
kept_graphs         which chunks keep their graph, and need no second pass
devices             where each encoder lies
replay              random numbers, autocast and buffers are the same in both passes
parameter_versions  parameters are the same in both passes
agreement           if one rank raises, all ranks raise
rollback            restores gradients after an error
replicas            compares the parameters that ranks hold copies of

inputs/             cuts a model's input into the parts of chunks
engines/            keeps DDP, FSDP and DeepSpeed from synchronizing in each pass
referred_modules    which modules a model refers to
observe             which modules a model calls
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
