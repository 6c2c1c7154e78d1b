"""Losses over all pairs of a batch that users declare: they write the formula, and the rest follows from it.

    L = mean over rows i of F(R_1(i), ..., R_K(i)) + the same over columns
    R_k(i) = reduction over the candidates j of f_k(s_ij, data of row i, data of column j, parameters)

In the order of a call:

module           PairLoss: holds a declaration, and computes its value on all ranks
reductions       what a user writes for a term: LogSumExp, Sum, Mean, Count, Max, Min, Partner
declaration      the terms by name, the functions that combine them, and which side reads which
arguments        the tensors of one call, by the side that they belong to
function_guard   calls of user's functions, under watch
function_checks  a small tile, computed before anything else: finds functions that no tile can be computed with
fingerprint      tells whether two ranks declare the same functions
row_data         the objects x, y, p and r that these functions read
similarity       s of a tile, and of single pairs
max_sim          s of single pairs whose rows are several vectors each
tile_entries     masks and scores of a tile, or of a list of pairs
masks            masks that are comparisons of integers
affine           scores that are affine in the similarity
lowering         which terms take the sweeps of the built-in losses, as passes over S; tiles compute the rest
accumulators     what is kept of each row and column while tiles come and go
tile             one tile: what it is computed from, what it adds, and its gradients
compiled         the same by functions that torch.compile has made of it
sweep            all tiles: forward into what is kept, backward into gradients
node             the sweep as an autograd node
lowered_terms    the terms of a call that are lowered; sigmoid_sums: those of softplus
pairs            partners, and the entries that have won: computed again from their two rows
statistics       the means of terms
candidates       candidates that belong to one row
builtin_terms    the reductions alone, for a loss of this library that has agreed with the ranks itself
failure          an error of a user's function on one rank, which all ranks raise together
step_counts      what a step holds, counted by steps of a few rows
reference        the same declaration on one dense matrix
"""

from .module import PairLoss
from .statistics import TermStatistics

__all__ = ["PairLoss", "TermStatistics"]
