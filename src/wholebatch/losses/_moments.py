"""Means and covariances over the rows of all ranks: d or d x d numbers, summed by all-reduces.

Every rank computes the same loss from these sums, and differentiates 1/W of it. The adjoint of each all-reduce adds up
the gradients of the ranks.
"""

from __future__ import annotations

from torch import Tensor

from ..comm import Communicator
from ..contract import Facts, finish
from ..sync import scale_gradient, shared_sum


def centered(facts: Facts, name: str) -> Tensor:
    """Return the local rows minus the mean of all ranks' rows, (b_r, d), widened. One all-reduce of d numbers."""
    x = facts.inputs[name].to(facts.dtype)
    return x - shared_sum(facts.comm, x.sum(0)) / facts.rows[name].total


def cross_product(comm: Communicator, x: Tensor, y: Tensor) -> Tensor:
    """Return sum_i x_i y_i^T over all ranks' rows: (b_r, d), (b_r, d) -> (d, d). One all-reduce."""
    return shared_sum(comm, x.T @ y)


def sum_of_squares(comm: Communicator, x: Tensor) -> Tensor:
    """Return sum_i x_i^2 over all ranks' rows, by feature: (b_r, d) -> (d,). One all-reduce."""
    return shared_sum(comm, x.square().sum(0))


def shared_loss(facts: Facts, loss: Tensor) -> Tensor:
    """Return a loss that every rank has computed from the same sums, with the gradient of one."""
    return finish(facts, scale_gradient(loss, 1 / facts.comm.size))
