"""Compute the similarity matrix S tile by tile, on one rank. Of a loss, only `pairs` is known here."""

from .driver import Block, Driver
from .hardest import HardestSweep
from .kernel_tiles import LARGEST, side_of_tiles
from .memory import Budget, KeptTiles, Memory, default_side, fit, smallest_budget
from .nested import NestedSweep
from .nested_kernels import KernelNestedSweep
from .pairs import NONE, Diagonals, Entries, EqualIds, NamedRows, Pairs, Union
from .ranking import RankingSweep
from .sigmoid import SigmoidSweep
from .sigmoid_kernels import KernelSigmoidSweep
from .soft_targets import SoftTargetSweep
from .softmax import LogitTransform, Over, Selection, SoftmaxSweep, Sums, Weights
from .softmax_kernels import KernelSoftmaxSweep

__all__ = [
    "LARGEST",
    "NONE",
    "Block",
    "Budget",
    "Diagonals",
    "Driver",
    "Entries",
    "EqualIds",
    "HardestSweep",
    "KeptTiles",
    "KernelNestedSweep",
    "KernelSigmoidSweep",
    "KernelSoftmaxSweep",
    "LogitTransform",
    "Memory",
    "NamedRows",
    "NestedSweep",
    "Over",
    "Pairs",
    "RankingSweep",
    "Selection",
    "SigmoidSweep",
    "SoftTargetSweep",
    "SoftmaxSweep",
    "Sums",
    "Union",
    "Weights",
    "default_side",
    "fit",
    "side_of_tiles",
    "smallest_budget",
]
