"""The linear maps that communication is made of, each beside its adjoint.

An operation on W ranks takes the tuple of all ranks' inputs x = (x_0, ..., x_{W-1}) to the tuple of their outputs.
It is linear, so it has an adjoint A*, with  <A x, y> = <x, A* y>  for all x and y. The inner product of the outputs
depends on the scalar that is differentiated. The caller chooses it, by the communicator's `loss=`:

    "sum"         the sum of the ranks' losses. Each rank calls backward on its L_r, and every input receives
                  d(sum_r L_r)/dx:   <u, v> = sum_r <u_r, v_r>.
    "replicated"  one loss L that every rank computes alike from the copies it holds, counted once. Copies then have
                  <u, v> = <u_0, v_0>; all other outputs, as above.

    map                        placement            adjoint, "sum"            adjoint, "replicated"
    -------------------------  -------------------  ------------------------  ------------------------------
    AllGather                  sharded -> copies    ReduceScatter             local rows      (nothing moves)
    ReduceScatter              partial -> sharded   AllGather                 AllGather
    AllReduce                  partial -> copies    AllReduce                 copy            (nothing moves)
    Broadcast(root)            root    -> copies    Reduce(root)              root's copy     (nothing moves)
    Reduce(root)               partial -> root      Broadcast(root)           Broadcast(root)
    AllToAll(n, m)             sharded -> sharded   AllToAll(m, n)            AllToAll(m, n)
      gather(root)             sharded -> root        scatter(root)             scatter(root)
      scatter(root)            root    -> sharded     gather(root)              gather(root)
    Send(dest) on one rank,    one rank -> another  Recv(dest) on the first,  the same
      Recv(source) on another                         Send(source) on the other   (both in `point_to_point`)

    sharded: each rank holds its local rows    partial: the true value is the sum over ranks
    copies:  each rank holds the same tensor   root:    rank `root` holds it; the input of the others counts as zero

For a loss that all ranks compute alike, the sum of the ranks' losses is W L: the two columns then differ by exactly W.

A map works along dimension 0 of a tensor and knows nothing of gradients (`autograd` does). `start` returns a function
that waits for the result, so that every map is also a nonblocking operation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .transport import Finish, Transport, done
from .wire import start_move, start_reduction

Loss = Literal["sum", "replicated"]
LOSSES: tuple[str, ...] = get_args(Loss)


@dataclass(frozen=True)
class Map(ABC):
    """Map the inputs of all ranks of `transport` to their outputs."""

    transport: Transport

    moves_data = True  # whether the ranks exchange anything

    @abstractmethod
    def start(self, x: Tensor) -> Finish:
        """Start the operation on this rank's x; the returned function waits for the result."""


class LinearMap(Map):
    """A linear map, which has an adjoint."""

    only_sends = False  # whether its output has no entries, and nobody waits for it but the sender

    def goes_in_order(self, x: Tensor) -> bool:
        """Whether the ranks find each other by the order of their starts alone: a message without a tag."""
        return False

    @property
    @abstractmethod
    def adjoint(self) -> LinearMap:
        """The adjoint A*, on the same ranks."""


@dataclass(frozen=True)
class Local(LinearMap):
    """The adjoint of a map to copies that count once: `part` of a y that all ranks hold alike, where nothing moves."""

    map: LinearMap
    part: Callable[[Tensor], Tensor]
    moves_data = False

    def start(self, x: Tensor) -> Finish:
        return done(self.part(x))

    @property
    def adjoint(self) -> LinearMap:
        return self.map


@dataclass(frozen=True)
class AllGather(LinearMap):
    """Concatenate the rows: y = scale concat_r x_r on every rank.

    <A x, y> = scale sum_r <x_r, sum_q y_q[rows r]>: A* = scale reduce_scatter.
    """

    counts: tuple[int, ...]
    loss: Loss = "sum"
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return start_move(x, lambda wire: self.transport.all_gather(wire, self.counts), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        if self.loss == "replicated":
            return Local(self.transport, self, lambda y: y.split(self.counts)[self.transport.rank].clone())
        return ReduceScatter(self.transport, self.counts, self.scale)


@dataclass(frozen=True)
class ReduceScatter(LinearMap):
    """Sum and distribute the rows: y_r = scale (sum_q x_q)[rows r]. The transpose of AllGather."""

    counts: tuple[int, ...]
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return start_reduction(x, lambda wide: self.transport.reduce_scatter(wide, self.counts), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        return AllGather(self.transport, self.counts, scale=self.scale)


@dataclass(frozen=True)
class AllReduce(LinearMap):
    """Sum: y = scale sum_q x_q on every rank. (Matrix of ones) (x) identity is symmetric: A* = A."""

    scale: float = 1.0
    loss: Loss = "sum"

    def start(self, x: Tensor) -> Finish:
        return start_reduction(x, lambda wide: self.transport.all_reduce(wide, "sum"), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        if self.loss == "replicated":
            return Local(self.transport, self, lambda y: y * self.scale if self.scale != 1 else y.clone())
        return self


@dataclass(frozen=True)
class Broadcast(LinearMap):
    """Give every rank the root's x: y_r = scale x_root.

    <A x, y> = scale <x_root, sum_r y_r>: A* = scale reduce to root, zero elsewhere.
    """

    root: int
    loss: Loss = "sum"
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return start_move(x, lambda wire: self.transport.broadcast(wire, self.root), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        if self.loss == "replicated":
            is_root = self.transport.rank == self.root
            return Local(self.transport, self, lambda y: y.clone() if is_root else torch.zeros_like(y))
        return Reduce(self.transport, self.root, self.scale)


@dataclass(frozen=True)
class Reduce(LinearMap):
    """Sum on the root: y_root = scale sum_r x_r, zero elsewhere. The transpose of Broadcast."""

    root: int
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return start_reduction(x, lambda wide: self.transport.reduce(wide, self.root), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        return Broadcast(self.transport, self.root, scale=self.scale)


@dataclass(frozen=True)
class AllToAll(LinearMap):
    """Exchange parts, y_r = concat_q (x_q's part for r), a permutation of rows: A* is its inverse."""

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    def start(self, x: Tensor) -> Finish:
        return start_move(x, lambda wire: self.transport.all_to_all(wire, self.send_counts, self.receive_counts))

    @property
    def adjoint(self) -> AllToAll:
        return AllToAll(self.transport, self.receive_counts, self.send_counts)


def gather(transport: Transport, counts: tuple[int, ...], root: int) -> AllToAll:
    """Concatenate the rows on the root, y_root = concat_r x_r; no rows elsewhere, where all parts are empty."""
    nothing = (0,) * transport.size
    send_counts = (*nothing[:root], counts[transport.rank], *nothing[root + 1 :])
    return AllToAll(transport, send_counts, counts if transport.rank == root else nothing)


def scatter(transport: Transport, counts: tuple[int, ...], root: int) -> AllToAll:
    """Distribute the root's rows, y_r = x_root[rows r]; the others pass no rows. The adjoint of gather."""
    return gather(transport, counts, root).adjoint
