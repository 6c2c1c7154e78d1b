"""Means and covariances over the rows of all ranks: d or d x d numbers, added up by all-reduces.

What a rank makes of such a number, every rank does: their adjoints add up the ranks' gradients again. The loss at the
end is the same on all ranks, and each accounts for 1/W of it.
"""

from __future__ import annotations

from torch import Tensor

from ..comm import Communicator
from ..sync import scale_gradient, shared_sum
from ._door import Agreement


def centered(agreed: Agreement, name: str) -> Tensor:
    """Own rows less the mean of all ranks', (b_r, d), in the accumulation dtype. One all-reduce of d numbers."""
    x = agreed.inputs[name].to(agreed.dtype)
    return x - shared_sum(agreed.comm, x.sum(0)) / agreed.rows[name].total


def cross_product(comm: Communicator, x: Tensor, y: Tensor) -> Tensor:
    """sum_i x_i y_i^T over all ranks' rows: (b_r, d), (b_r, d) -> (d, d). One all-reduce."""
    return shared_sum(comm, x.T @ y)


def sum_of_squares(comm: Communicator, x: Tensor) -> Tensor:
    """sum_i x_i^2 over all ranks' rows, by feature: (b_r, d) -> (d,). One all-reduce."""
    return shared_sum(comm, x.square().sum(0))


def of_all_ranks(agreed: Agreement, loss: Tensor) -> Tensor:
    """A loss that all ranks compute from shared sums."""
    return agreed.result(scale_gradient(loss, 1 / agreed.comm.size))
