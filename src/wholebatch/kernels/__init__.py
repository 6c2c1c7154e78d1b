"""What a GPU does with a tile, written in Triton. Knows tiles and numbers, no losses and no ranks.

Triton is no dependency: nothing here imports it before a kernel is asked for.
"""

from .launch import (
    Entries,
    OfRows,
    TileOf,
    interpreted,
    tile_gradient,
    tile_sigmoid,
    tile_sums,
)
from .select import KERNELS, Kernel, check_kernel, in_triton

__all__ = [
    "KERNELS",
    "Entries",
    "Kernel",
    "OfRows",
    "TileOf",
    "check_kernel",
    "in_triton",
    "interpreted",
    "tile_gradient",
    "tile_sigmoid",
    "tile_sums",
]
