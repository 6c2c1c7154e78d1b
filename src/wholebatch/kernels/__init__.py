"""What a GPU does with a tile, written in Triton. Knows tiles and numbers, no losses and no ranks.

Triton is no dependency: nothing here imports it before a kernel is asked for.
"""

from .launch import Blocks, Entries, TileSums, blocks_for, interpreted, tile_gradient, tile_sums
from .select import KERNELS, Kernel, check_kernel, in_triton

__all__ = [
    "KERNELS",
    "Blocks",
    "Entries",
    "Kernel",
    "TileSums",
    "blocks_for",
    "check_kernel",
    "in_triton",
    "interpreted",
    "tile_gradient",
    "tile_sums",
]
