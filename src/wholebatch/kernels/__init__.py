"""What a GPU does with a tile, written in Triton. Knows tiles and numbers, no losses and no ranks.

Triton is no dependency: nothing here imports it before a kernel is asked for.
"""

from .launch import Blocks, Entries, OfRows, TileOf, interpreted, using
from .nested import Ends, nested_gradient, nested_sums
from .select import KERNELS, Kernel, check_kernel, in_triton
from .sigmoid import tile_sigmoid
from .softmax import tile_gradient, tile_sums

__all__ = [
    "KERNELS",
    "Blocks",
    "Ends",
    "Entries",
    "Kernel",
    "OfRows",
    "TileOf",
    "check_kernel",
    "in_triton",
    "interpreted",
    "nested_gradient",
    "nested_sums",
    "tile_gradient",
    "tile_sigmoid",
    "tile_sums",
    "using",
]
