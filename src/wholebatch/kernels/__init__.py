"""Triton kernels for the tiles of a sweep, and one launcher for each. They know no loss and no rank.

Triton is no dependency: it is imported when the first kernel starts.

    tiles/                      the kernels
    softmax, sigmoid, nested    their launchers: functions of a tile
    rows, angles                those of kernels that pass over rows once; over rows and the centers of their classes
    tokens                      those of late interaction, whose rows and columns are tokens
    launch, blocks              the parts that all launchers share; the block of S that a program computes
    expected, verify          their results in plain PyTorch; a comparison of every launch with it
    select, choice              where kernels can run; the choices that ranks have made
    verdicts                    results of checks and times, kept for the next run

To add a kernel, write a module in `tiles`, its launcher in a module of the same name with a line here, a sweep that
calls the launcher, the choice of that sweep in `nodes`, and in `tests/kernel_losses.py` the losses that start it.
"""

from .blocks import Blocks
from .choice import Choice, choices
from .launch import Entries, RowTerms, TileInputs, exact, interpreted, laid_out, numbers_of, using
from .nested import Ends, NestedTile, NestedWeights
from .rows import READABLE, RowNumbers, pair_losses, pair_weights, row_gradient, row_numbers, side_weights
from .select import KERNELS, Kernel, check_kernel, chooses, missing
from .sigmoid import add_sigmoid, sigmoid_sums
from .tokens import TokenTile, TokenWeights
from .verify import (
    KernelError,
    check_angles,
    check_rows,
    document_gradient,
    nested_gradient,
    nested_sums,
    query_gradient,
    tile_gradient,
    tile_sigmoid,
    tile_sums,
    token_maxima,
    token_sums,
    verifying,
)

__all__ = [
    "KERNELS",
    "READABLE",
    "Blocks",
    "Choice",
    "Ends",
    "Entries",
    "Kernel",
    "KernelError",
    "NestedTile",
    "NestedWeights",
    "RowNumbers",
    "RowTerms",
    "TileInputs",
    "TokenTile",
    "TokenWeights",
    "add_sigmoid",
    "check_angles",
    "check_kernel",
    "check_rows",
    "choices",
    "chooses",
    "document_gradient",
    "exact",
    "interpreted",
    "laid_out",
    "missing",
    "nested_gradient",
    "nested_sums",
    "numbers_of",
    "pair_losses",
    "pair_weights",
    "query_gradient",
    "row_gradient",
    "row_numbers",
    "side_weights",
    "sigmoid_sums",
    "tile_gradient",
    "tile_sigmoid",
    "tile_sums",
    "token_maxima",
    "token_sums",
    "using",
    "verifying",
]
