"""The one protocol that every loss, strategy and exchange speaks.

Each operation is differentiable, and its docstring names its adjoint; the table of maps and adjoints, for both
conventions of `loss`, is at the top of `maps`. The files below this one: `nodes` makes maps differentiable, `order`
keeps the backward pass in order, `handshake` and `messages` do the checking, a `transport` moves the bytes.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor

from .._checks import check_choice, check_flag, check_instance, check_integer, shown
from . import compiled, maps, nodes
from .arguments import OPS, SUMS, check_tensor, checked_counts, checked_dim, checked_op, parts, without
from .binding import CallError, complaint
from .call import Call, signature
from .compiled import collective, compiles_to, eager
from .handle import Handle
from .handshake import GRAD_ENABLED, NEEDS_GRAD, SIGNATURE, handshake
from .maps import LOSSES, Loss
from .messages import exchange_signatures, refusal
from .nonlinear import reduce_nonlinearly
from .order import Order
from .transport import ABANDONED, CHANNELS, Checked, CommunicationError, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

_WAITING = "the collectives that wait for the backward pass"


class Communicator:
    """An ordered set of ranks that call the same operations in the same order.

    Args:
        transport: what moves the bytes; each subclass makes its own.
        loss: which scalar `backward` differentiates. "sum": the sum of the ranks' losses, each rank calling backward
            on its own; this is the true adjoint. "replicated": one loss that every rank computes alike from the
            copies that all_gather, all_reduce and broadcast gave it, counted once; those three then need no
            communication in backward. Where all ranks compute one loss alike, the gradients of "sum" are W times those
            of "replicated".
        check: whether ranks first make sure, by a handshake of 2 KiB, that all of them make the same call with the
            same dtype, shape and options, forward and backward; then a rank that diverges is a ValueError on all
            ranks. None: the environment variable WHOLEBATCH_CHECK, on unless it is 0. A nonblocking operation blocks
            in its handshake.
        trace: whether every operation, its adjoint too, prints one line to stderr. None: WHOLEBATCH_TRACE, off
            unless it is 1.

    **Backward.** `loss.backward()` is enough where all ranks build the same graph. Where they do not (one rank has no
    loss, some only send, a result is used here and not there), call :meth:`backward` on every rank.

    **Gradients.** An operation takes part in the backward pass on all ranks if gradients are enabled and the dtype is
    floating-point or complex; with checking, only if some rank's input requires a gradient. So a rank whose own
    input needs none still serves the others, and `torch.no_grad()` has to be entered on all ranks or on none. A
    message takes part if, with checking, what is sent requires a gradient; without checking, always.

    **Dtypes and layouts.** Any dtype moves; sums need numbers. float16 and bfloat16 are summed in float32. Inputs may
    be non-contiguous, parts may be empty, parts may differ in size between ranks wherever there are `counts`.
    """

    def __init__(
        self, transport: Transport, *, loss: Loss = "sum", check: bool | None = None, trace: bool | None = None
    ) -> None:
        check_instance("transport", transport, Transport, "a Transport; use one of the subclasses of Communicator")
        check_choice("loss", loss, LOSSES)
        self.transport = transport
        self.loss: Loss = loss
        self.check = _switch("WHOLEBATCH_CHECK", check, default=True)
        self.trace = _switch("WHOLEBATCH_TRACE", trace, default=False)
        self._order = Order()
        self.calls = 0  # collectives so far, the same on all ranks
        self._messages = 0
        self._slots: dict[tuple[str, int, int], int] = {}
        self._dropped: list[str] = []
        self._handles: WeakSet[Handle] = WeakSet()

    @property
    def rank(self) -> int:
        """Index of this process in the communicator, 0 <= rank < size."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of ranks, W."""
        return self.transport.size

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, loss={self.loss!r}, check={self.check})"

    @compiles_to(compiled.all_gather)
    def all_gather(
        self, x: Tensor, *, counts: Sequence[int] | None = None, dim: int = 0, check: bool | None = None
    ) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, rank 0 first, on every rank; adjoint: :meth:`reduce_scatter`.

        sharded -> copies. Under `loss="replicated"` the adjoint is this rank's own slice, and moves nothing.

        Args:
            x: n_r entries along `dim` on rank r; n_r may differ between ranks and may be 0, other dimensions may not.
            counts: (n_0, ..., n_{W-1}) where the caller knows them, and knows that dtype and other dimensions agree;
                otherwise a handshake finds out.
            dim: the dimension along which the ranks' tensors are joined.
            check: overrides the communicator's `check` for this call; here and below.

        Returns:
            sum_r n_r entries along `dim`.

        Raises:
            ValueError: on every rank, if x has no such dimension, or dtype or other dimensions differ between ranks;
                with `counts`, on this rank, if they contradict x.
        """
        entry, counts = self._enter_rows("all_gather", x, counts, dim, check)
        return self._apply(entry, maps.AllGather(self.transport, counts, self.loss), x, dim)

    @collective
    def iall_gather(
        self, x: Tensor, *, counts: Sequence[int] | None = None, dim: int = 0, check: bool | None = None
    ) -> Handle:
        """Start an :meth:`all_gather`; adjoint of start and wait: wait and start of a reduce_scatter."""
        entry, counts = self._enter_rows("iall_gather", x, counts, dim, check)
        return self._start(entry, maps.AllGather(self.transport, counts, self.loss), x, dim)

    @compiles_to(compiled.reduce_scatter)
    def reduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        dim: int = 0,
        check: bool | None = None,
    ) -> Tensor:
        """Reduce the ranks' tensors and hand each rank its own part of the result; adjoint: :meth:`all_gather`.

        partial -> sharded.

        Args:
            x: sum_r n_r entries along `dim`, the same shape on every rank.
            op: "sum" or "avg"; "max", "min" and "prod" too, by an all_reduce of all of x.
            counts: (n_0, ..., n_{W-1}), the entries that each rank receives; by default as evenly as possible, the
                remainder going to the first ranks.
            dim: the dimension that is distributed.
            check: as in :meth:`all_gather`.

        Returns:
            n_r entries along `dim` on rank r.

        Raises:
            ValueError: on every rank, if shape, dtype, `op` or `counts` differ between ranks, if `counts` does not
                have one entry per rank or does not add up to x, or `op` does not suit the dtype.
        """
        entry, counts = self._enter_parts("reduce_scatter", x, op, counts, dim, check)
        if op in SUMS:
            return self._apply(entry, maps.ReduceScatter(self.transport, counts, self._scale(op)), x, dim)
        with entry.gradients():
            return reduce_nonlinearly(x, op, entry.call, "sum").split(counts, dim)[self.rank].clone()

    @collective
    def ireduce_scatter(
        self,
        x: Tensor,
        op: str = "sum",
        *,
        counts: Sequence[int] | None = None,
        dim: int = 0,
        check: bool | None = None,
    ) -> Handle:
        """Start a sum or average :meth:`reduce_scatter`; adjoint of start and wait: wait and start of an all_gather."""
        entry, counts = self._enter_parts("ireduce_scatter", x, op, counts, dim, check, ops=SUMS)
        return self._start(entry, maps.ReduceScatter(self.transport, counts, self._scale(op)), x, dim)

    @compiles_to(compiled.all_reduce)
    def all_reduce(self, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Tensor:
        """Reduce the ranks' tensors elementwise, the result on every rank; adjoint of sum and average: itself.

        partial -> copies. Under `loss="replicated"` the adjoint is the identity, and moves nothing. The gradient of a
        maximum or minimum goes to the ranks that attain it, in equal parts, as in `torch.amax`.

        Args:
            x: the same shape and dtype on every rank.
            op: "sum", "avg", "max", "min" or "prod".
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if shape, dtype or `op` differ between ranks, or `op` does not suit the dtype.
        """
        entry = self._enter("all_reduce", x, lambda: {"op": checked_op(op, x, OPS)}, check)
        if op in SUMS:
            return self._apply(entry, maps.AllReduce(self.transport, self._scale(op), self.loss), x)
        with entry.gradients():
            return reduce_nonlinearly(x, op, entry.call, self.loss)

    @collective
    def iall_reduce(self, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Handle:
        """Start a sum or average :meth:`all_reduce`; adjoint of start and wait: wait and start of an all_reduce."""
        entry = self._enter("iall_reduce", x, lambda: {"op": checked_op(op, x, SUMS)}, check)
        return self._start(entry, maps.AllReduce(self.transport, self._scale(op), self.loss), x)

    @collective
    def broadcast(self, x: Tensor, root: int = 0, *, check: bool | None = None) -> Tensor:
        """Give every rank the tensor of rank `root`; adjoint: :meth:`reduce`.

        root -> copies. On the other ranks x tells shape and dtype, and its gradient is zero. Under
        `loss="replicated"` the adjoint keeps the root's gradient, and moves nothing.

        Raises:
            ValueError: on every rank, if shape, dtype or `root` differ between ranks, or `root` is not a rank of this
                communicator.
        """
        entry = self._enter("broadcast", x, lambda: {"root": self._checked_rank("root", root)}, check)
        return self._apply(entry, maps.Broadcast(self.transport, root, self.loss), x)

    @collective
    def reduce(self, x: Tensor, op: str = "sum", *, root: int = 0, check: bool | None = None) -> Tensor:
        """Reduce the ranks' tensors, the result on rank `root` and zeros elsewhere; adjoint: :meth:`broadcast`.

        partial -> root.

        Args:
            x: the same shape and dtype on every rank.
            op: "sum" or "avg"; "max", "min" and "prod" too, by an all_reduce.
            root: the rank that receives the result.
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if shape, dtype, `op` or `root` differ between ranks, `op` does not suit the
                dtype, or `root` is not a rank of this communicator.
        """

        def state() -> dict[str, Any]:
            return {"root": self._checked_rank("root", root), "op": checked_op(op, x, OPS)}

        entry = self._enter("reduce", x, state, check)
        if op in SUMS:
            return self._apply(entry, maps.Reduce(self.transport, root, self._scale(op)), x)
        with entry.gradients():
            y = reduce_nonlinearly(x, op, entry.call, "sum")
            return y if self.rank == root else y.masked_fill(torch.ones_like(y, dtype=torch.bool), 0)

    @collective
    def gather(
        self,
        x: Tensor,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        dim: int = 0,
        check: bool | None = None,
    ) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, rank 0 first, on rank `root`; adjoint: :meth:`scatter`.

        sharded -> root.

        Args:
            x: n_r entries along `dim` on rank r; n_r may differ between ranks and may be 0, other dimensions may not.
            root: the rank that receives them.
            counts: as in :meth:`all_gather`.
            check: as in :meth:`all_gather`.
            dim: the dimension along which the ranks' tensors are joined.

        Returns:
            sum_r n_r entries along `dim` on rank `root`, 0 elsewhere; what flows back into those is ignored.

        Raises:
            ValueError: as in :meth:`all_gather`; also if `root` differs between ranks or is no rank.
        """
        entry, counts = self._enter_rows("gather", x, counts, dim, check, root=root)
        return self._apply(entry, maps.Gather(self.transport, counts, root), x, dim)

    @collective
    def scatter(
        self,
        x: Tensor | None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        dim: int = 0,
        check: bool | None = None,
    ) -> Tensor:
        """Hand each rank its own part of the tensor of rank `root`; adjoint: :meth:`gather`.

        root -> sharded.

        Args:
            x: on rank `root`, sum_r n_r entries along `dim`. On the others None, or a tensor of the same dtype and
                other dimensions, on the device where the result shall be; its gradient is zero.
            root: the rank that distributes.
            counts: (n_0, ..., n_{W-1}), the same on all ranks; by default as evenly as possible. Without checking,
                they and a tensor on every rank save the handshake.
            dim: the dimension that is distributed.
            check: as in :meth:`all_gather`.

        Returns:
            n_r entries along `dim` on rank r.

        Raises:
            ValueError: on every rank, if the root has no tensor, dtype or other dimensions contradict the root's,
                `counts` do not add up, or `root` differs between ranks or is no rank.
        """
        checking = counts is None or self._checking(check)

        def state() -> dict[str, Any]:
            self._checked_rank("root", root)
            if x is None and not checking:
                raise ValueError("without checking, every rank passes a tensor: here for example like.new_empty(0, d)")
            if self.rank == root:
                if x is None:
                    raise ValueError("rank `root` must pass the tensor to scatter, got None")
                rows = checked_dim(x, dim)
                asked = parts(counts, self.size, x, rows)
                others = without(x.shape, rows)
                return {"root": root, "counts": list(asked), "dtype": str(x.dtype), "others": others, "dim": rows}
            if x is None:
                return {"root": root}
            rows = checked_dim(x, dim)
            return {"root": root, "dtype": str(x.dtype), "others": without(x.shape, rows), "dim": rows}

        entry = self._enter("scatter", x, state, check, must_match=("root",), always=counts is None, optional=True)
        if entry.everyone is not None:
            told = entry.everyone[root]
            for rank, facts in enumerate(entry.everyone):
                for name in ("dtype", "dim", "others"):
                    if name in facts and facts[name] != told[name]:
                        what = "other dimensions" if name == "others" else name
                        raise ValueError(
                            f"scatter: {what} must be those of the root, rank {root}: {told[name]}; "
                            f"rank {rank}: {facts[name]}"
                        )
            counts = told["counts"]
            if x is None:
                shape = [*told["others"]]
                shape.insert(told["dim"], 0)
                x = torch.empty(shape, dtype=getattr(torch, told["dtype"].removeprefix("torch.")))
        assert x is not None
        assert counts is not None
        with entry.gradients():
            x = x if self.rank == root else x.narrow(dim, 0, 0)
        return self._apply(entry, maps.Scatter(self.transport, tuple(counts), root), x, dim)

    @compiles_to(compiled.all_to_all)
    def all_to_all(
        self,
        x: Tensor,
        *,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
        dim: int = 0,
        check: bool | None = None,
    ) -> Tensor:
        """Send part q of x to rank q, and concatenate what comes, rank 0's first; adjoint: itself, counts exchanged.

        sharded -> sharded.

        Args:
            x: the parts for rank 0, 1, ... along `dim`; other dimensions are the same on all ranks.
            send_counts: how many entries go to each rank; by default as evenly as possible.
            receive_counts: how many come from each rank, where the caller knows; otherwise a handshake finds out.
            dim: the dimension that is distributed and joined.
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if dtype or other dimensions differ between ranks, or the counts of the two ends
                contradict each other or x.
        """

        def state() -> dict[str, Any]:
            rows = checked_dim(x, dim)
            asked = parts(send_counts, self.size, x, rows, "send_counts")
            if receive_counts is not None:
                checked_counts(receive_counts, self.size, None, x, "receive_counts")
            expects = None if receive_counts is None else list(receive_counts)
            return {
                "dtype": str(x.dtype),
                "dim": rows,
                "other dimensions": without(x.shape, rows),
                "sends": list(asked),
                "expects": expects,
            }

        must_match = ("dtype", "dim", "other dimensions")
        unknown = send_counts is None or receive_counts is None
        entry = self._enter("all_to_all", x, state, check, must_match, always=unknown)
        if entry.everyone is not None:
            for rank, facts in enumerate(entry.everyone):
                comes = [other["sends"][rank] for other in entry.everyone]
                if facts["expects"] is not None and facts["expects"] != comes:
                    raise ValueError(
                        f"all_to_all: rank {rank} has receive_counts {facts['expects']}, but the ranks send it {comes}"
                    )
            send_counts = entry.everyone[self.rank]["sends"]
            receive_counts = [facts["sends"][self.rank] for facts in entry.everyone]
        assert send_counts is not None
        assert receive_counts is not None
        map = maps.AllToAll(self.transport, tuple(send_counts), tuple(receive_counts))
        return self._apply(entry, map, x, dim)

    @eager
    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        """Send x to rank `dest`; adjoint: :meth:`recv` of its gradient from there.

        Nothing leads from here to a loss, so the backward pass starts with :meth:`backward`.

        Raises:
            ValueError: if `dest` is no rank or `tag` is out of range; with checking, at both ends, if what is sent is
                not what is received.
        """
        self.isend(x, dest, tag=tag).wait()

    @eager
    def recv(self, like: Tensor, source: int, *, tag: int = 0) -> Tensor:
        """Receive a tensor with the shape, dtype and device of `like` from rank `source`; adjoint: :meth:`send`.

        Raises:
            ValueError: if `source` is no rank or `tag` is out of range; with checking, at both ends, if what is sent
                is not what is received.
        """
        y = self.irecv(like, source, tag=tag).wait()
        assert y is not None
        return y

    @eager
    def isend(self, x: Tensor, dest: int, *, tag: int = 0) -> Handle:
        """Start to :meth:`send`; adjoint of start and wait: wait and start of a recv."""
        self._checked_rank("dest", dest)
        entry, verify = self._enter_message(f"isend to rank {dest}", x, dest, tag, sends=True)
        slot, epoch = self._slot("to", dest, tag), self._epoch("to", dest, tag)
        map = maps.Send(self.transport, dest, tag, maps.FORWARD, slot, epoch, x.shape)
        return self._start(entry, map, x, verify=verify, arrange=lambda _: None)

    @eager
    def irecv(self, like: Tensor, source: int, *, tag: int = 0) -> Handle:
        """Start to :meth:`recv`; adjoint of start and wait: wait and start of a send."""
        self._checked_rank("source", source)
        entry, verify = self._enter_message(f"irecv from rank {source}", like, source, tag, sends=False)
        slot, epoch = self._slot("from", source, tag), self._epoch("from", source, tag)
        map = maps.Recv(self.transport, source, tag, maps.FORWARD, slot, epoch, like.shape)
        return self._start(entry, map, like.detach().new_empty(0), verify=verify)

    @eager
    def wait(self, handle: Handle) -> Tensor | None:
        """The result of a nonblocking operation, None for a send: `handle.wait()`.

        Raises:
            ValueError: if `handle` is not a handle of this communicator, or has been waited for already.
        """
        if not isinstance(handle, Handle) or handle._comm is not self:
            raise ValueError(f"handle must be one that this communicator returned, got {shown(handle)}")
        return handle.wait()

    @collective
    def split(self, color: int | None) -> Communicator | None:
        """The communicator of the ranks that pass the same `color`, in their order here; None for `color=None`.

        Collective over this communicator. The parts share its settings, and its order: :meth:`backward` of any of
        them covers the calls of all. A part holds descriptors and threads of this process (torch.distributed), or one
        of the few communicators that there can be (MPI), until it is closed: by :meth:`close`, or by
        `with comm.split(color) as part:`.

        Raises:
            ValueError: on every rank, if a color is neither an integer nor None.
        """

        def state() -> dict[str, Any]:
            if color is not None:
                check_integer("color", color, least=-(2**63), most=2**63 - 1, of="or None")
            return {"color": color, "name": uuid4().hex}

        self.transport.check_open()
        everyone = handshake(self, state, caller="split")
        members = [rank for rank, facts in enumerate(everyone) if facts["color"] == color]
        transport = self.transport.split(members, member=color is not None, name=everyone[members[0]]["name"])
        if transport is None:
            return None
        part: Communicator = object.__new__(type(self))
        Communicator.__init__(part, transport, loss=self.loss, check=self.check, trace=self.trace)
        part._order = self._order
        return part

    @eager
    def close(self) -> None:
        """End this communicator; any use of it from now on is a ValueError. To close it again does nothing.

        A communicator that :meth:`split` made ends its process group, or frees its MPI communicator. That is
        collective over it: every rank closes it, after its last operation and the backward passes of its operations.
        Any other belongs to the caller, who made its group: the group stays as it is, and nothing is collective.

        Parts of this communicator live on. The threads and descriptors of a process group end with the last that
        refers to it: take care that nothing else does.

        Raises:
            ValueError: on every rank, if handles of this communicator have not been waited for; it stays open.
            CommunicationError: if a rank does not come; closed all the same.
        """
        if self.transport.closed:
            return
        try:
            if self.transport.ends_with_close:
                handshake(self.transport, self._state_at_close, caller="close")
            else:
                self._state_at_close()
        except CommunicationError:
            self.transport.close()
            raise
        self.transport.close()

    def __enter__(self) -> Self:
        self.transport.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close it. After an error on this rank, which the others may not have, without waiting for them."""
        if error is None:
            self.close()
        elif any(handle.under_way for handle in self._handles):
            Transport.close(self.transport)
            ABANDONED.append(self.transport)  # the group's own end would wait for what is under way
        else:
            self.transport.close()

    def _state_at_close(self) -> dict[str, Any]:
        self._refuse_dropped_handles()
        under_way = sorted(handle.name for handle in self._handles if handle.under_way)
        if under_way:
            raise ValueError(f"operations are under way: {', '.join(under_way)}; wait for each before close()")
        return {}

    @collective
    def backward(
        self, loss: Tensor | None = None, gradient: Tensor | None = None, *, retain_graph: bool = False
    ) -> None:
        """Backward of this rank's loss, and of every call of this communicator since the last backward pass.

        On every rank, with None where there is no loss. The adjoints run in exactly the reverse order of the calls, so
        that ranks with different graphs, or without a loss, meet in every one of them. Parts made by :meth:`split`
        take part.

        Args:
            loss: this rank's scalar, or None. Which scalar is differentiated, is the communicator's `loss`.
            gradient: of the objective with respect to `loss`, by default 1.
            retain_graph: keep the graph for another backward pass; the same on all ranks.

        Raises:
            ValueError: with checking, on every rank: if there is nothing to differentiate (`loss` requires no gradient,
                and no call waits for one), if `loss` is no scalar and has no `gradient`, if a handle was dropped,
                if different collectives of this communicator wait for the backward pass on different ranks, or if
                `retain_graph` is not the same on all.
        """
        self.transport.check_not_closed()

        def state() -> dict[str, Any]:
            self._refuse_dropped_handles()
            check_flag("retain_graph", retain_graph)
            if loss is not None:
                check_tensor("loss", loss)
            if gradient is not None:
                check_tensor("gradient", gradient)
                if loss is None or gradient.shape != loss.shape or gradient.dtype != loss.dtype:
                    raise ValueError("gradient must have the shape and dtype of loss, and needs a loss")
            if loss is not None and gradient is None and loss.numel() != 1:
                raise ValueError(
                    f"loss must have one element, or come with its gradient; got shape {tuple(loss.shape)}"
                )
            calls = self._order.waiting()
            waiting = [call.name for call in calls if call.collective and call.transport is self.transport]
            if loss is not None and not loss.requires_grad and not calls:
                raise ValueError(
                    "loss does not require a gradient, and no operation of this communicator waits for one; were the "
                    "inputs detached, or the loss computed under torch.no_grad()?"
                )
            ends = f", {waiting[0]} to {waiting[-1]}" if waiting else ""
            calls_waiting = f"{len(waiting)}{ends} [{crc32(' '.join(waiting).encode()):08x}]"
            return {_WAITING: calls_waiting, "retain_graph": retain_graph}

        if self.check:
            handshake(self, state, caller="backward", must_match=(_WAITING, "retain_graph"))
        else:
            state()
        self._order.backward(loss, gradient, retain_graph)

    def _enter(
        self,
        operation: str,
        x: Tensor | None,
        options: Callable[[], Mapping[str, Any]],
        check: bool | None,
        must_match: Sequence[str] = ("dtype", "shape", "op", "root"),
        *,
        always: bool = False,
        optional: bool = False,
    ) -> _Entry:
        """The beginning of every collective: this rank's arguments are sound and, with checking, everyone's agree."""
        self.transport.check_open()
        self.calls += 1
        name = f"{operation} #{self.calls}"
        checking = always or self._checking(check)

        def state() -> dict[str, Any]:
            self._refuse_dropped_handles()
            if check is not None:
                check_flag("check", check)
            if x is not None or not optional:
                check_tensor("x", x)
            facts: dict[str, Any] = {
                GRAD_ENABLED: torch.is_grad_enabled(),
                NEEDS_GRAD: x is not None and x.requires_grad,
            }
            if x is not None:
                facts |= {"dtype": str(x.dtype), "shape": list(x.shape), SIGNATURE: signature(x)}
            return {**facts, **options()}

        everyone = None
        if checking:
            everyone = handshake(self.transport, state, caller=name, must_match=(*must_match, GRAD_ENABLED))
        else:
            state()
        joins = everyone is None or any(facts[NEEDS_GRAD] for facts in everyone)
        checked: Checked = "before" if check is False else checking
        call = Call(self.transport, name, check=checked, trace=self.trace)
        return _Entry(self._order.enter(call), joins, everyone)

    def _refuse_call(self, method: str, error: CallError, given: Mapping[str, Any]) -> None:
        """Raise an error about arguments that do not fit a collective method, on all ranks where they check calls."""
        self.transport.check_open()
        takes = inspect.signature(getattr(type(self), method)).parameters
        check = given.get("check") if "check" in takes else None
        unknown = any(given.get(name) is None for name in takes if name.endswith("counts"))
        if method == "split" or unknown or self._checking(check):  # as the ranks that made no mistake do
            handshake(self, complaint(error), caller=f"{type(self).__name__}.{method}")
        self.calls += method != "backward"

    def _enter_rows(
        self, operation: str, x: Tensor, counts: Sequence[int] | None, dim: int, check: bool | None, **options: Any
    ) -> tuple[_Entry, tuple[int, ...]]:
        """The beginning of a collective to which each rank brings its own rows; and how many each of them brings."""

        def state() -> dict[str, Any]:
            for name, value in options.items():
                self._checked_rank(name, value)
            rows = checked_dim(x, dim)
            if counts is not None:
                checked_counts(counts, self.size, x.shape[rows], x, rank=self.rank)
            given = None if counts is None else list(counts)
            return {
                **options,
                "dim": rows,
                "rows": x.shape[rows],
                "trailing shape": without(x.shape, rows),
                "counts": given,
            }

        names = ("dtype", "dim", "trailing shape", "counts", *options)
        entry = self._enter(operation, x, state, check, names, always=counts is None)
        if counts is None:
            assert entry.everyone is not None
            counts = [facts["rows"] for facts in entry.everyone]
        return entry, tuple(counts)

    def _enter_parts(
        self,
        operation: str,
        x: Tensor,
        op: str,
        counts: Sequence[int] | None,
        dim: int,
        check: bool | None,
        ops: tuple[str, ...] = OPS,
    ) -> tuple[_Entry, tuple[int, ...]]:
        """The beginning of a collective that distributes what all ranks hold; and how much each rank receives."""
        asked: Sequence[int] = ()

        def state() -> dict[str, Any]:
            nonlocal asked
            rows = checked_dim(x, dim)
            asked = parts(counts, self.size, x, rows)
            return {"op": checked_op(op, x, ops), "counts": list(asked), "dim": rows}

        entry = self._enter(operation, x, state, check, ("dtype", "shape", "op", "counts", "dim"))
        return entry, tuple(asked)

    def _enter_message(
        self, operation: str, x: Tensor, peer: int, tag: int, *, sends: bool
    ) -> tuple[_Entry, Callable[[], bool] | None]:
        """The beginning of a message's end: nothing collective, but with checking the peer hears of a mistake."""
        self.transport.check_open()
        self._refuse_dropped_handles()
        largest = self.transport.max_tag // (CHANNELS * maps.tags_of_one(self.transport)) - 1
        check_integer("tag", tag, least=0, most=largest)
        direction = "to" if sends else "from"
        if self._epoch(direction, peer, tag) >= maps.EPOCHS:
            raise ValueError(
                f"{maps.EPOCHS} messages {direction} rank {peer} with tag {tag} did not fit what was expected; use "
                "another tag"
            )
        try:
            check_tensor("x" if sends else "like", x)
        except (ValueError, TypeError) as error:
            if not self.check or peer == self.rank:
                raise
            self._slot(direction, peer, tag)
            self._failed(direction, peer, tag)
            raise refusal(self.transport, error, operation, sends=sends, peer=peer, tag=tag) from error
        self._messages += 1
        call = Call(
            self.transport,
            f"{operation} (message #{self._messages})",
            collective=False,
            check=self.check,
            trace=self.trace,
        )
        verify = None
        if self.check:
            agree = exchange_signatures(self.transport, x, operation, sends=sends, peer=peer, tag=tag)

            def verify() -> bool:
                try:
                    return agree()
                except (ValueError, TypeError):
                    self._failed(direction, peer, tag)
                    raise

        # A receiver learns only at its wait whether what it is sent requires a gradient.
        joins = x.requires_grad or not sends or not self.check
        return _Entry(self._order.enter(call), joins, None), verify

    def _apply(self, entry: _Entry, map: maps.LinearMap, x: Tensor, dim: int = 0) -> Tensor:
        """map(x), with the rows of x along `dim`."""
        with entry.gradients():
            y = nodes.apply(map, x.movedim(dim, 0) if dim else x, entry.call)
            return y.movedim(0, dim) if dim else y

    def _start(
        self,
        entry: _Entry,
        map: maps.LinearMap,
        x: Tensor,
        dim: int = 0,
        *,
        verify: Callable[[], bool] | None = None,
        arrange: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Handle:
        """A handle of map(x), with the rows of x along `dim`."""
        call = entry.call
        with entry.gradients():
            flight, ticket = nodes.start(map, x.movedim(dim, 0) if dim else x, call)
        if arrange is None:
            arrange = (lambda y: y.movedim(0, dim)) if dim else (lambda y: y)
        if call.collective and call.check is True:
            verify = partial(self._agree_to_wait, call)
        handle = Handle(self, flight, ticket, x, verify=verify, arrange=arrange)
        self._handles.add(handle)
        return handle

    def _agree_to_wait(self, call: Call) -> bool:
        """All ranks wait for the same nonblocking collective next: so their adjoints start in the same order, too."""
        handshake(self, dict, caller=f"wait for {call.name}")
        return True

    def _slot(self, direction: str, peer: int, tag: int) -> int:
        """The number of the next message, which its other end counts alike."""
        number = self._slots.get((direction, peer, tag), 0)
        self._slots[direction, peer, tag] = number + 1
        return number % maps.SLOTS

    def _epoch(self, direction: str, peer: int, tag: int) -> int:
        """How many messages did not fit, which both ends have been told."""
        return self.transport.failed.get((direction, peer, tag), 0)

    def _failed(self, direction: str, peer: int, tag: int) -> None:
        """What is left of a message that did not fit is never taken for a later one."""
        self.transport.failed[direction, peer, tag] = self._epoch(direction, peer, tag) + 1

    def _scale(self, op: str) -> float:
        return 1.0 if op == "sum" else 1.0 / self.size

    def _checking(self, check: bool | None) -> bool:
        """Whether a call with such a `check` begins with a handshake; what is no bool is refused in it."""
        return check if isinstance(check, bool) else self.check

    def _checked_rank(self, name: str, rank: int) -> int:
        if not isinstance(rank, int) or isinstance(rank, bool) or not 0 <= rank < self.size:
            raise ValueError(f"{name} must be a rank of this communicator, 0 to {self.size - 1}; got {shown(rank)}")
        return rank

    def _refuse_dropped_handles(self) -> None:
        """An operation without an end is reported once."""
        if self._dropped:
            names, self._dropped = ", ".join(self._dropped), []
            raise ValueError(f"handles were dropped without wait(): {names}; keep each handle and wait for it once")


@dataclass(frozen=True)
class _Entry:
    """A call that may go ahead."""

    call: Call
    joins: bool  # whether it takes part in the backward pass
    everyone: list[dict[str, Any]] | None  # the ranks' facts, with checking

    def gradients(self) -> AbstractContextManager[object]:
        """Inside, gradients are enabled only if they are outside and the call joins."""
        return torch.set_grad_enabled(self.joins and torch.is_grad_enabled())


def _switch(variable: str, asked: bool | None, *, default: bool) -> bool:
    if asked is not None:
        return check_flag(variable.rpartition("_")[2].lower(), asked)
    value = os.environ.get(variable, str(int(default)))
    if value not in ("0", "1"):
        raise ValueError(f"the environment variable {variable} must be 0 or 1, got {value!r}")
    return value == "1"
