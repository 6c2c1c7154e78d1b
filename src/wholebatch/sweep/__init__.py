"""What happens to a tile of the similarity matrix. Knows no ranks and, but for `pairs`, no loss."""

from .driver import Block, Driver
from .memory import Budget, KeptTiles, Memory, default_side, fit, smallest_budget
from .pairs import Pairs
from .sigmoid import SigmoidSweep
from .softmax import SoftmaxSweep

__all__ = [
    "Block",
    "Budget",
    "Driver",
    "KeptTiles",
    "Memory",
    "Pairs",
    "SigmoidSweep",
    "SoftmaxSweep",
    "default_side",
    "fit",
    "smallest_budget",
]
