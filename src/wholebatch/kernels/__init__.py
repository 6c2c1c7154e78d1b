"""Triton kernels for the tiles of a sweep, and one launcher for each. They know no loss and no rank.

Triton is no dependency: it is imported when the first kernel starts.

    tiles/                      the kernels
    softmax, sigmoid, nested    their launchers: functions of a tile
    launch, blocks              the parts that all launchers share; the block of S that a program computes
    select, doubts              whether kernels are used; GPUs on which they must be checked first

To add a kernel, write a module in `tiles`, its launcher in a module of the same name with a line here, a sweep that
calls the launcher, the choice of that sweep in `nodes`, and in `tests/kernel_losses.py` the losses that start it.
"""

from .blocks import Blocks
from .doubts import in_doubt, passed_check
from .launch import Entries, RowTerms, TileInputs, interpreted, using
from .nested import Ends, NestedTile, NestedWeights, nested_gradient, nested_sums
from .select import KERNELS, Kernel, check_kernel, in_triton
from .sigmoid import tile_sigmoid
from .softmax import tile_gradient, tile_sums

__all__ = [
    "KERNELS",
    "Blocks",
    "Ends",
    "Entries",
    "Kernel",
    "NestedTile",
    "NestedWeights",
    "RowTerms",
    "TileInputs",
    "check_kernel",
    "in_doubt",
    "in_triton",
    "interpreted",
    "nested_gradient",
    "nested_sums",
    "passed_check",
    "tile_gradient",
    "tile_sigmoid",
    "tile_sums",
    "using",
]
