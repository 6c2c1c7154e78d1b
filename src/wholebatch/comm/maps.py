"""The linear maps that communication is made of, each beside its adjoint.

An operation on W ranks takes the tuple of all ranks' inputs x = (x_0, ..., x_{W-1}) to the tuple of their outputs.
It is linear, so it has an adjoint A*, with  <A x, y> = <x, A* y>  for all x and y. What the inner product of the
outputs is depends on what the caller differentiates, and the caller says so (`loss=`, of the communicator):

    "sum"         the sum of the ranks' losses. Each rank calls backward on its own L_r, and every input receives
                  d(sum_r L_r)/dx:   <u, v> = sum_r <u_r, v_r>.
    "replicated"  one loss L that every rank computes alike from the copies it holds, counted once. Copies then have
                  <u, v> = <u_0, v_0>; everything else, as above.

    map                        placement            adjoint, "sum"            adjoint, "replicated"
    -------------------------  -------------------  ------------------------  ------------------------------
    AllGather                  sharded -> copies    ReduceScatter             OwnRows         (nothing moves)
    ReduceScatter              partial -> sharded   AllGather                 AllGather
    AllReduce                  partial -> copies    AllReduce                 Copy            (nothing moves)
    Broadcast(root)            root    -> copies    Reduce(root)              AtRoot(root)    (nothing moves)
    Reduce(root)               partial -> root      Broadcast(root)           Broadcast(root)
    Gather(root)               sharded -> root      Scatter(root)             Scatter(root)
    Scatter(root)              root    -> sharded   Gather(root)              Gather(root)
    AllToAll(n, m)             sharded -> sharded   AllToAll(m, n)            AllToAll(m, n)
    Send(dest) on one rank,    one rank -> another  Recv(dest) on the first,  the same
      Recv(source) on another                         Send(source) on the other

    sharded: each rank holds its own rows      partial: the true value is the sum over ranks
    copies:  each rank holds the same tensor   root:    rank `root` holds it; what others pass counts as zero

For a loss that all ranks compute alike, the sum of the ranks' losses is W L: the two columns then differ by exactly W.

A map works along dimension 0 of a tensor and knows nothing of autograd (`nodes` does). `start` puts it under way and
returns a function that waits for the result, so that every map is also a nonblocking operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from .._precision import accumulation_dtype

if TYPE_CHECKING:
    from .transport import Transport

_CARRIERS = {
    getattr(torch, name): carrier
    for carrier, names in (
        (torch.uint8, ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")),
        (torch.float16, ("int16", "uint16")),
        (torch.int32, ("uint32", "complex32")),
        (torch.int64, ("uint64",)),
    )
    for name in names
    if hasattr(torch, name)
}
Finish = Callable[[], Tensor]  # waits for an operation that is under way, and returns its result
Loss = Literal["sum", "replicated"]
LOSSES: tuple[str, ...] = get_args(Loss)


@dataclass(frozen=True)
class Map(ABC):
    """A map from the inputs of all ranks of `transport` to their outputs."""

    transport: Transport

    moves_data = True  # whether the ranks exchange anything

    @abstractmethod
    def start(self, x: Tensor) -> Finish:
        """Put the operation on this rank's x under way."""


class LinearMap(Map):
    """A map that is linear, and so has an adjoint."""

    @property
    @abstractmethod
    def adjoint(self) -> LinearMap:
        """A*, on the same ranks."""


@dataclass(frozen=True)
class AllGather(LinearMap):
    """y = concat_r x_r on every rank.  <A x, y> = sum_r <x_r, sum_q y_q[rows r]>: A* = reduce_scatter."""

    counts: tuple[int, ...]
    loss: Loss = "sum"

    def start(self, x: Tensor) -> Finish:
        return _moved(x, lambda wire: self.transport.all_gather(wire, self.counts))

    @property
    def adjoint(self) -> LinearMap:
        return (
            ReduceScatter(self.transport, self.counts) if self.loss == "sum" else OwnRows(self.transport, self.counts)
        )


@dataclass(frozen=True)
class OwnRows(LinearMap):
    """y_r = x[rows r], of an x that all ranks hold alike.  Counted once: A* = all_gather."""

    counts: tuple[int, ...]
    moves_data = False

    def start(self, x: Tensor) -> Finish:
        return _done(x.split(self.counts)[self.transport.rank].clone())

    @property
    def adjoint(self) -> LinearMap:
        return AllGather(self.transport, self.counts, loss="replicated")


@dataclass(frozen=True)
class ReduceScatter(LinearMap):
    """y_r = scale (sum_q x_q)[rows r].  The transpose of all_gather: A* = scale all_gather."""

    counts: tuple[int, ...]
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return _sum(x, lambda wide: self.transport.reduce_scatter(wide, self.counts), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        return _scaled(AllGather(self.transport, self.counts), self.scale)


@dataclass(frozen=True)
class AllReduce(LinearMap):
    """y = scale sum_q x_q on every rank.  (Matrix of ones) (x) identity is symmetric: A* = all_reduce."""

    scale: float = 1.0
    loss: Loss = "sum"

    def start(self, x: Tensor) -> Finish:
        return _sum(x, lambda wide: self.transport.all_reduce(wide, "sum"), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        return self if self.loss == "sum" else Copy(self.transport, self.scale)


@dataclass(frozen=True)
class Copy(LinearMap):
    """y_r = scale x, of an x that all ranks hold alike.  Counted once: A* = scale all_reduce."""

    scale: float = 1.0
    moves_data = False

    def start(self, x: Tensor) -> Finish:
        return _done(x * self.scale if self.scale != 1 else x.clone())

    @property
    def adjoint(self) -> LinearMap:
        return AllReduce(self.transport, self.scale, loss="replicated")


@dataclass(frozen=True)
class Broadcast(LinearMap):
    """y_r = x_root.  <A x, y> = <x_root, sum_r y_r>: A* = reduce to root, zero elsewhere."""

    root: int
    loss: Loss = "sum"

    def start(self, x: Tensor) -> Finish:
        return _moved(x, lambda wire: self.transport.broadcast(wire, self.root))

    @property
    def adjoint(self) -> LinearMap:
        return Reduce(self.transport, self.root) if self.loss == "sum" else AtRoot(self.transport, self.root)


@dataclass(frozen=True)
class AtRoot(LinearMap):
    """y_root = x, zero elsewhere, of an x that all ranks hold alike.  Counted once: A* = broadcast from root."""

    root: int
    moves_data = False

    def start(self, x: Tensor) -> Finish:
        return _done(x.clone() if self.transport.rank == self.root else torch.zeros_like(x))

    @property
    def adjoint(self) -> LinearMap:
        return Broadcast(self.transport, self.root, loss="replicated")


@dataclass(frozen=True)
class Reduce(LinearMap):
    """y_root = scale sum_r x_r, zero elsewhere.  The transpose of broadcast: A* = scale broadcast from root."""

    root: int
    scale: float = 1.0

    def start(self, x: Tensor) -> Finish:
        return _sum(x, lambda wide: self.transport.reduce(wide, self.root), self.scale)

    @property
    def adjoint(self) -> LinearMap:
        return _scaled(Broadcast(self.transport, self.root), self.scale)


@dataclass(frozen=True)
class Gather(LinearMap):
    """y_root = concat_r x_r, no rows elsewhere.  <A x, y> = sum_r <x_r, y_root[rows r]>: A* = scatter."""

    counts: tuple[int, ...]
    root: int

    def start(self, x: Tensor) -> Finish:
        return _moved(x, lambda wire: self.transport.gather(wire, self.counts, self.root))

    @property
    def adjoint(self) -> LinearMap:
        return Scatter(self.transport, self.counts, self.root)


@dataclass(frozen=True)
class Scatter(LinearMap):
    """y_r = x_root[rows r]; the others pass no rows.  The transpose of gather: A* = gather."""

    counts: tuple[int, ...]
    root: int

    def start(self, x: Tensor) -> Finish:
        return _moved(x, lambda wire: self.transport.scatter(wire, self.counts, self.root))

    @property
    def adjoint(self) -> LinearMap:
        return Gather(self.transport, self.counts, self.root)


@dataclass(frozen=True)
class AllToAll(LinearMap):
    """y_r = concat_q (x_q's part for r).  A permutation of rows: A* is its inverse, the counts exchanged."""

    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]

    def start(self, x: Tensor) -> Finish:
        return _moved(x, lambda wire: self.transport.all_to_all(wire, self.send_counts, self.receive_counts))

    @property
    def adjoint(self) -> LinearMap:
        return AllToAll(self.transport, self.receive_counts, self.send_counts)


@dataclass(frozen=True)
class Send(LinearMap):
    """x to rank `dest`; the output has no entries.  A* receives the gradient from there, on its own channel.

    `slot` numbers the messages of one tag, alike at both ends: gradients find their message whatever the order in which
    the ends waited. `epoch` counts those that did not fit: what is left of them is never taken for a later one.
    """

    dest: int
    tag: int
    channel: int
    slot: int
    epoch: int
    shape: torch.Size

    def start(self, x: Tensor) -> Finish:
        finish = _moved(x, lambda wire: self.transport.send(wire, self.dest, _wire_tag(self, wire), self.channel))

        def no_entries() -> Tensor:
            finish()
            return x.new_empty(0)

        return no_entries

    @property
    def adjoint(self) -> LinearMap:
        return Recv(self.transport, self.dest, self.tag, _opposite(self.channel), self.slot, self.epoch, self.shape)


@dataclass(frozen=True)
class Recv(LinearMap):
    """A tensor of the given shape from rank `source`; the input has no entries.  A* sends the gradient there."""

    source: int
    tag: int
    channel: int
    slot: int
    epoch: int
    shape: torch.Size

    def start(self, x: Tensor) -> Finish:
        out = x.new_empty(self.shape)
        return _moved(out, self._received)

    def _received(self, out: Tensor) -> Finish:
        wire_tag = _wire_tag(self, out)
        if self.channel == FORWARD and self.transport.size_classes > 1 and out.numel():
            # As large as anything of this class: what does not fit is longer or shorter, but never too long.
            room = out.new_empty(-(-largest_of_class(size_class(out.nbytes)) // out.itemsize))
            finish = self.transport.recv(room, self.source, wire_tag, self.channel)
            return lambda: finish()[: out.numel()].view(out.shape)
        return self.transport.recv(out, self.source, wire_tag, self.channel)

    @property
    def adjoint(self) -> LinearMap:
        return Send(self.transport, self.source, self.tag, _opposite(self.channel), self.slot, self.epoch, self.shape)


@dataclass(frozen=True)
class Scaled(LinearMap):
    """Scale times another map: what an average's adjoint is."""

    map: LinearMap
    scale: float

    def start(self, x: Tensor) -> Finish:
        finish = self.map.start(x)
        return lambda: finish() * self.scale

    @property
    def adjoint(self) -> LinearMap:
        return Scaled(self.transport, self.map.adjoint, self.scale)


FORWARD, ADJOINT = 0, 1  # a gradient on its way back is never mistaken for a message on its way out


SLOTS = 64  # messages of one tag whose gradients may be under way at once
EPOCHS = 64  # messages of one tag that may fail
SIZE_CLASSES = 192  # of transports on which a message that is too long would end the process that receives it


def tags_of_one(transport: Transport) -> int:
    """How many tags on the wire a tag of the user's stands for."""
    return max(SLOTS, EPOCHS * transport.size_classes)


def size_class(num_bytes: int) -> int:
    """The class of a message of so many bytes, four for each power of two: those of one class fit into its largest."""
    k = 4 * (num_bytes - 1).bit_length() if num_bytes > 1 else 0
    while k and largest_of_class(k - 1) >= num_bytes:
        k -= 1
    return k


def largest_of_class(k: int) -> int:
    """Bytes: 2^(k / 4), rounded down; the same integer on every machine."""
    return math.isqrt(math.isqrt(1 << k))


def _wire_tag(message: Send | Recv, x: Tensor) -> int:
    """Of a message with x's bytes.

    Messages of one tag and size arrive in the order in which they were sent; gradients are told apart by their slot.
    """
    of_one = message.tag * tags_of_one(message.transport)
    if message.channel == ADJOINT:
        return of_one + message.slot
    classes = message.transport.size_classes
    return of_one + message.epoch * classes + (size_class(x.nbytes) if classes > 1 else 0)


def _opposite(channel: int) -> int:
    return ADJOINT if channel == FORWARD else FORWARD


def _scaled(map: LinearMap, scale: float) -> LinearMap:
    return map if scale == 1 else Scaled(map.transport, map, scale)


def _done(y: Tensor) -> Finish:
    return lambda: y


def _plain(x: Tensor) -> Tensor:
    """x as transports move it: its entries side by side in memory, no conjugation or negation pending."""
    return x.detach().resolve_conj().resolve_neg().contiguous()


def _moved(x: Tensor, start: Callable[[Tensor], Finish]) -> Finish:
    """Start a movement; dtypes that backends do not know travel as others of the same size, bit for bit."""
    wire = _plain(x)
    carrier = _CARRIERS.get(x.dtype)
    if carrier is None:
        return start(wire)
    finish = start(wire.view(carrier))
    return lambda: finish().view(x.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In what numbers of a dtype are summed or compared: backends have no integers of 16 bits."""
    return torch.int32 if dtype == torch.int16 else accumulation_dtype(dtype)


def _sum(x: Tensor, start: Callable[[Tensor], Finish], scale: float) -> Finish:
    """Start a sum: half precision is widened to float32, complex numbers travel as pairs of real ones."""
    summed = _plain(x).to(wide(x.dtype))
    finish = start(torch.view_as_real(summed) if summed.is_complex() else summed)

    def result() -> Tensor:
        y = finish()
        if summed.is_complex():
            y = torch.view_as_complex(y)
        return (y * scale if scale != 1 else y).to(x.dtype)

    return result
