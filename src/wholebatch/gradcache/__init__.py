"""Gradient caching: the gradient of a batch whose activations do not fit, with one parameter synchronization per step.

grad_cache       GradCache and its arguments
functional       `cached` and other decorators, for a caller's own loop
step             the two passes of a step
first_pass       forward, without graphs
second_pass      forward again, and backward
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
devices          the devices of each encoder
keep             which chunks keep their graph, and need no second pass
replay           random numbers, autocast and buffers are the same in both passes
agreement        if one rank raises, all ranks raise
rollback         restores gradients after an error

observe          which modules a model calls
parameter_sync   when an engine such as DDP may synchronize
passed_by        finds calls that bypass their DDP
held             finds engines that synchronize too early
replicas         compares the parameters that ranks hold copies of
"""

from .functional import cached, cat_input_tensor, gather_input_tensor
from .grad_cache import GradCache
from .multimodal import MultimodalSplit
from .parameter_sync import SyncControl, register_sync_control
from .parts import InputChunk
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
    "gather_input_tensor",
    "register_sync_control",
]
