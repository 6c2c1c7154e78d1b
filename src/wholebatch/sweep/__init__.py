"""What happens to a tile of the similarity matrix. Knows no ranks and, but for `pairs`, no loss."""

from .driver import Block, Driver
from .memory import Budget, KeptTiles, Memory, default_side, fit, smallest_budget
from .pairs import NONE, Diagonals, Entries, EqualIds, Pairs, Union
from .sigmoid import SigmoidSweep
from .softmax import Bend, Over, Selection, SoftmaxSweep, Sums, Weights

__all__ = [
    "NONE",
    "Bend",
    "Block",
    "Budget",
    "Diagonals",
    "Driver",
    "Entries",
    "EqualIds",
    "KeptTiles",
    "Memory",
    "Over",
    "Pairs",
    "Selection",
    "SigmoidSweep",
    "SoftmaxSweep",
    "Sums",
    "Union",
    "Weights",
    "default_side",
    "fit",
    "smallest_budget",
]
