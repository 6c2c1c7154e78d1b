"""Autograd nodes: statistics of the rows of S from features, and gradients of the features from theirs.

    route          the exchange that moves Y, and the memory of this rank's sweep
    towers         from features to X, whose rows stay, and Y, whose rows travel
    row_statistics logsumexp, targets and more, for each row and column: the entry for most losses
    softmax        the node that computes them; softmax_plan: operands and facts of a call; shifts: of exponentials
    cross_entropy  from these statistics to losses, and those of one positive for each row
    one_tile       the same node for a small batch with one positive for each row
    matrix         a small S at once, for all other cases, and for terms of users
    sigmoid        losses that are a sum over the entries of S
    in_kernels     the parts of softmax_in_kernels and sigmoid_in_kernels, which compute common cases in a few launches
    nested         the softmax of several nested S at once
    soft_targets   cross-entropy with the softmax of another S for targets
    ranks          smooth ranks of positives
    fetch          rows of other ranks, by index
    root           a loss that one rank computes

A node receives the facts on which the ranks agreed. It does not know which loss uses it.
"""

from .cross_entropy import pair_losses, view_losses
from .route import Layout, Route, Vectors, choose_route, choose_token_route, items_of_ranks, token_driver
from .row_statistics import Planned, RowStatistics, Scale, row_statistics, statistics_fields
from .softmax_plan import Bounds, Operands
from .towers import Towers
