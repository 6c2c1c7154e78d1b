"""Validate a call on all ranks before any features are sent, and finish it alike on all ranks.

    entry       a call whose arguments do not fit its signature raises on every rank; autocast is off inside
    in_graph    a loss in a compiled graph is one operator, and its backward pass another
    options     the choices that every loss shares: group, sync, exchange, memory, reduction, kernel,
                precision, checks
    inputs      a loss's declaration of its tensors and scalars, checked on the rank that has them
    agree       one handshake: every rank's arguments are valid and fit together, or every rank raises
    deferred    with checks="deferred": what a call assumes, and what the host reads at the next one
    facts       the facts that every rank then knows about all ranks
    forms       what the ranks have agreed on, kept for later calls with the same shapes and settings
    gradients   an input that requires a gradient on one rank requires it on all; the factor of `sync`
    reduction   from the losses of the local rows to the scalar that every rank returns; every rank enters the backward
                pass of the same call, with the same incoming gradient
    canaries    numbers of a step that show a mistake to all ranks at the entry of the next call
    group       the state that the ranks of a group keep from call to call

This package knows no loss. A loss decides which entries of S count, and `nodes` computes them.
"""

from .agree import LEFT_OUT, agree
from .canaries import Canaries
from .deferred import Assumption, Deferred
from .entry import bind_on_all_ranks, entry, prepared, raise_on_all_ranks
from .facts import Facts
from .forms import KERNELS
from .gradients import check_inference, gradient_facts, join
from .group import CALL, latest_call, state_of
from .inputs import MIN_PAIR_PRODUCT, Checks, Inputs, form_of_tensor, norm_of
from .options import (
    BatchOptions,
    Checking,
    KernelOptions,
    LossOptions,
    Options,
    ProductOptions,
    Reduction,
    SweepOptions,
)
from .reduction import finish, reduce_losses, reduce_total, together
