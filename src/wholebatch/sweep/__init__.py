"""Compute the similarity matrix S tile by tile, on one rank.

driver        tiles of S, and products of their gradients with X and Y; memory: the size and the number of tiles
products      the precision of these products
pairs         the positive and the excluded entries, which is all that a sweep knows of a loss
softmax       sums of exponentials of rows and columns: selection says which entries, sides holds the sums
nested        the same sums for several leading parts of the features
sigmoid       sums of a function of each entry
soft_targets  means of S under the softmax of another S
hardest       the hardest positive and negative of each row
ranking       smooth counts of the entries that are larger than a row's positives
max_sim       tiles of S whose rows and columns are several vectors each: late interaction; items are these rows and
              columns, copies
              their equal vectors, token_budget the memory, kept_winners what need not be computed again

`softmax_kernels`, `nested_kernels` and `sigmoid_kernels` compute the same in Triton, by `kernel_tiles` and `members`;
`max_sim_kernels` computes maxima over tokens.
"""

from .driver import Block, Driver
from .hardest import HardestSweep
from .kept_winners import KeptWinners
from .kernel_tiles import LARGEST, columns_of_tiles, entries_of_memory, in_memory, tiles_of_launches
from .max_sim import Documents, MaxSimDriver
from .max_sim_kernels import KernelMaxSimDriver
from .members import Members, members
from .memory import Budget, KeptTiles, Memory, bytes_of_an_entry, default_side, fit, smallest_budget
from .nested import NestedSweep
from .nested_kernels import KernelNestedSweep
from .pairs import NONE, Diagonals, Entries, EqualIds, NamedRows, Pairs, Union
from .products import PRECISIONS, Factor, Precision, Products, select_products
from .ranking import RankingSweep
from .selection import LogitTransform, Over, Selection
from .sides import Sums, Weights
from .sigmoid import SigmoidSweep
from .sigmoid_kernels import KernelSigmoidSweep
from .soft_targets import SoftTargetSweep
from .softmax import SoftmaxSweep
from .softmax_kernels import KernelSoftmaxSweep, relative_difference
from .token_budget import TokenBudget, bytes_of_winners, fit_tokens, integer_for, smallest_token_budget
