"""Gradient caching: the gradient of a batch whose activations do not fit, with one parameter synchronization per step.

grad_cache       GradCache and its arguments
encode           representations of one model, for a loss of the caller's
functional       `cached` and other decorators, for a caller's own loop

entry            ranks agree that their calls are valid
step             the two passes of a step
immediate        a step that makes its own backward pass
deferred         a step whose second passes are made in the backward pass of a caller
first_pass       forward, without graphs
second_pass      forward again, and backward
backward         one backward pass, seen by the chunk's engines or hidden from them
one_pass         one forward pass with a graph; compares the second pass with the first
chunks           encoders, and the chunks of their batches
inputs           cuts an input into chunks, and calls a model with one
call_form        a mapping is keywords, or one argument
token_budget     TokenBudget: plans chunks by their number of tokens
parts            the input of one chunk, whose rows may stand in any order
multimodal       MultimodalSplit: texts with images, whose pixels do not have the batch's rows
image_counts     finds the images of each row in an input
row_items        images of rows and patches of images, as integers
padding          fills up representations of tokens
keep             which chunks keep their graph, and need no second pass
replay           random numbers, autocast and buffers are the same in both passes
unchanged        parameters are the same in both passes
agreement        if one rank raises, all ranks raise
rollback         restores gradients after an error

referred_modules which modules a model refers to
observe          which modules a model calls

sync_control     the switch of an engine that synchronizes gradients
engines          the engines that are known
engine_ddp       DistributedDataParallel
engine_fsdp      FSDP, both versions
engine_deepspeed DeepSpeed, ZeRO 0 to 3
enclosing        encoders that are called inside the engine's forward pass
passed_by        finds calls that bypass their DDP
held             finds engines that synchronize too early
replicas         compares the parameters that ranks hold copies of
"""

from .encode import encode
from .engines import register_sync_control
from .functional import cached, cat_input_tensor, gather_input_tensor
from .grad_cache import GradCache
from .multimodal import MultimodalSplit
from .parts import InputChunk
from .sync_control import SyncControl
from .token_budget import TokenBudget, TokenChunk

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
