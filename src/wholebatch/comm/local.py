"""The communicator of one process: every collective is the identity."""

from __future__ import annotations

from torch import Tensor

from .communicator import Communicator


class LocalCommunicator(Communicator):
    """Size 1, rank 0, no process group: what every `group=None` becomes when nothing is initialised."""

    @property
    def rank(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return 1

    def __repr__(self) -> str:
        return "LocalCommunicator()"

    def _all_gather(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        return x.clone()

    def _reduce_scatter(self, x: Tensor, counts: tuple[int, ...]) -> Tensor:
        return x.clone()

    def _all_reduce(self, x: Tensor, op: str) -> Tensor:
        return x.clone()

    def _broadcast(self, x: Tensor, root: int) -> Tensor:
        return x.clone()

    def _reduce(self, x: Tensor, root: int) -> Tensor:
        return x.clone()
