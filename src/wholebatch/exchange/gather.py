"""Exchange "gather": every rank sees all of Y at once. Memory O(B d), two collectives."""

from __future__ import annotations

from torch import Tensor

from ..comm import Communicator
from ..partition import Partition


class GatherExchange:
    """Y's shards out by one all-gather, its gradient home by the adjoint, one reduce-scatter."""

    def __init__(self, comm: Communicator, partition: Partition) -> None:
        self._comm, self._partition = comm, partition

    def bring(self, y_local: Tensor) -> Tensor:
        """(b, d), this rank's rows -> (B, d), all rows. At size 1 it is y_local itself."""
        if self._comm.size == 1:
            return y_local
        return self._comm.all_gather(y_local, counts=self._partition.counts, check=False)

    def take_home(self, grad_y_partial: Tensor) -> Tensor:
        """(B, d), what this rank's rows contribute to all of dY -> (b, d), the whole of its own dY."""
        if self._comm.size == 1:
            return grad_y_partial
        return self._comm.reduce_scatter(grad_y_partial, counts=self._partition.counts, check=False)
