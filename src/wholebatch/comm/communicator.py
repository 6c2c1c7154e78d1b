"""The communicator, which every loss, strategy and exchange uses.

Each operation is differentiable, and its docstring names its adjoint; the table of maps and adjoints, for both
conventions of `loss`, is at the top of `maps`. A call is entered in `entry`, becomes a node of autograd's graph in
`autograd`, and keeps its place in the backward pass in `order`; a `transport` moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any
from uuid import uuid4
from weakref import WeakSet
from zlib import crc32

import torch
from torch import Tensor

from .._base.checks import check_flag, check_integer, shown
from . import autograd, compiled, maps
from .arguments import OPS, SUMS, check_tensor, checked_op
from .compiled import collective, compiles_to, eager
from .handle import Handle
from .handshake import handshake
from .maps import Loss
from .message_entry import MessageEntry
from .nonlinear import reduce_nonlinearly
from .order import Call
from .point_to_point import End, Recv, Send
from .records import Facts, FactsByRank
from .transport import ABANDONED, CommunicationError, Transport

if TYPE_CHECKING:
    from typing_extensions import Self

_WAITING = "the collectives that wait for the backward pass"


class Communicator(MessageEntry):
    """An ordered set of ranks that call the same operations in the same order.

    Args:
        transport: moves the bytes; each subclass makes one.
        loss: the scalar that `backward` differentiates. "sum": the sum of the ranks' losses; each rank calls backward
            on its local loss. This is the true adjoint. "replicated": one loss, which every rank computes from its copy
            of the results of all_gather, all_reduce and broadcast, and which counts once. These three then need no
            communication in backward. If all ranks compute the same loss, the gradients of "sum" are W times those of
            "replicated".
        check: whether ranks first compare their calls in a handshake, forward and backward. If the operation, dtype,
            shape or options of one rank differ, all ranks raise ValueError. None: the environment variable
            WHOLEBATCH_CHECK, on unless it is 0. A nonblocking operation blocks in its handshake.
        trace: whether every operation, and its adjoint, prints one line to stderr. None: WHOLEBATCH_TRACE, off
            unless it is 1.

    **Backward.** `loss.backward()` is enough if all ranks build the same graph. If not (one rank has no loss, some only
    send, only some ranks use a result), call :meth:`backward` on every rank.

    **Gradients.** An operation takes part in the backward pass on all ranks if gradients are enabled and the dtype is
    floating-point or complex; with checking, only if some rank's input requires a gradient. So a rank whose local
    input needs none still takes part for the others. Enter `torch.no_grad()` on all ranks or on none. With checking, a
    message takes part if the tensor that is sent requires a gradient; without checking, always.

    **Dtypes and layouts.** All dtypes work; sums need numbers. float16 and bfloat16 are summed in float32. Inputs may
    be non-contiguous, and parts may be empty. Operations with `counts` accept different sizes on each rank.

    **Cost.** Checking adds a handshake, an all-gather of 512 bytes per rank, to every operation and to its adjoint.
    Results are new tensors; no operation writes into its input.

    >>> import torch, wholebatch as wb
    >>> comm, x = wb.comm.LocalCommunicator(), torch.ones(2, 3, requires_grad=True)
    >>> comm.all_gather(x).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 3])
    """

    def __init__(
        self, transport: Transport, *, loss: Loss = "sum", check: bool | None = None, trace: bool | None = None
    ) -> None:
        super().__init__(transport, loss, check, trace)
        self._handles: WeakSet[Handle] = WeakSet()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, loss={self.loss!r}, check={self.check})"

    @collective
    def handshake(
        self, state: Callable[[], Mapping[str, object]], *, caller: str, must_match: Sequence[str] = ()
    ) -> FactsByRank:
        """Exchange every rank's facts; raise on every rank if any rank's `state` raises or the facts clash.

        Collective: one all-gather of 512 bytes per rank (none at size 1), and a second one, of texts, where facts
        other than numbers differ. It has no gradient.

        Args:
            state: checks this rank's arguments and returns its facts as JSON values; an error that it raises becomes
                this rank's complaint.
            caller: the function whose arguments these are, for the message; the same on all ranks.
            must_match: names of facts that have to be equal on all ranks.

        Returns:
            The facts of rank 0, 1, ..., W - 1.

        Raises:
            ValueError: on every rank, with every complaint, or with each rank's value of the fact that differs.
            TypeError: the same, where all complaints are about arguments that do not fit a signature.
            CommunicationError: if a rank does not come, or sends something else.

        >>> import wholebatch as wb
        >>> wb.comm.LocalCommunicator().handshake(lambda: {"rows": 3}, caller="my_loss")
        [{'rows': 3}]
        """
        self._calls += 1
        return handshake(self.transport, state, caller=caller, must_match=must_match, checked="of a loss")

    @compiles_to(compiled.all_gather)
    def all_gather(
        self, x: Tensor, *, counts: Sequence[int] | None = None, dim: int = 0, check: bool | None = None
    ) -> Tensor:
        """Concatenate the ranks' tensors along `dim`, rank 0 first, on every rank; adjoint: :meth:`reduce_scatter`.

        sharded -> copies: y = concat_r x_r. Under `loss="replicated"` the adjoint is the local slice; nothing moves.

        Args:
            x: n_r entries along `dim` on rank r; n_r may differ between ranks and may be 0, other dimensions may not.
            counts: (n_0, ..., n_{W-1}) where the caller knows them, and knows that dtype and other dimensions agree;
                None: a handshake finds out.
            dim: the dimension along which the ranks' tensors are joined.
            check: overrides the communicator's `check` for this call; here and below.

        Returns:
            sum_r n_r entries along `dim`.

        Raises:
            ValueError: on every rank, if x has no such dimension, or dtype or other dimensions differ between ranks;
                with `counts`, on this rank, if they contradict x.
        """
        call, counts = self._enter_rows("all_gather", x, counts, dim, check)
        return self._apply(call, maps.AllGather(self.transport, counts, self.loss), x, dim)

    @collective
    def iall_gather(
        self, x: Tensor, *, counts: Sequence[int] | None = None, dim: int = 0, check: bool | None = None
    ) -> Handle:
        """Start an :meth:`all_gather`; adjoint of start and wait: wait and start of a reduce_scatter."""
        call, counts = self._enter_rows("iall_gather", x, counts, dim, check)
        return self._start(call, maps.AllGather(self.transport, counts, self.loss), x, dim)

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
        """Reduce the ranks' tensors and give each rank its part of the result; adjoint: :meth:`all_gather`.

        partial -> sharded: y_r = (sum_q x_q)[rows r].

        Args:
            x: sum_r n_r entries along `dim`, the same shape on every rank.
            op: "sum" or "avg"; also "max", "min" and "prod", by an all_reduce of all of x.
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
        call, counts = self._enter_parts("reduce_scatter", x, op, counts, dim, check)
        if op in SUMS:
            return self._apply(call, maps.ReduceScatter(self.transport, counts, self._scale(op)), x, dim)
        with call.gradients():
            return reduce_nonlinearly(x, op, call, "sum").split(counts, dim)[self.rank].clone()

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
        call, counts = self._enter_parts("ireduce_scatter", x, op, counts, dim, check, ops=SUMS)
        return self._start(call, maps.ReduceScatter(self.transport, counts, self._scale(op)), x, dim)

    @compiles_to(compiled.all_reduce)
    def all_reduce(self, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Tensor:
        """Reduce the ranks' tensors elementwise, the result on every rank; adjoint of sum and average: itself.

        partial -> copies: y = sum_q x_q. Under `loss="replicated"` the adjoint is the identity, and moves nothing. The
        gradient of a maximum or minimum goes to the ranks that attain it, in equal parts, as in `torch.amax`.

        Args:
            x: the same shape and dtype on every rank.
            op: "sum", "avg", "max", "min" or "prod".
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if shape, dtype or `op` differ between ranks, or `op` does not suit the dtype.
        """
        call, _ = self._enter("all_reduce", x, lambda: {"op": checked_op(op, x, OPS)}, check)
        if op in SUMS:
            return self._apply(call, maps.AllReduce(self.transport, self._scale(op), self.loss), x)
        with call.gradients():
            return reduce_nonlinearly(x, op, call, self.loss)

    @collective
    def iall_reduce(self, x: Tensor, op: str = "sum", *, check: bool | None = None) -> Handle:
        """Start a sum or average :meth:`all_reduce`; adjoint of start and wait: wait and start of an all_reduce."""
        call, _ = self._enter("iall_reduce", x, lambda: {"op": checked_op(op, x, SUMS)}, check)
        return self._start(call, maps.AllReduce(self.transport, self._scale(op), self.loss), x)

    @collective
    def broadcast(self, x: Tensor, root: int = 0, *, check: bool | None = None) -> Tensor:
        """Give every rank the tensor of rank `root`; adjoint: :meth:`reduce`.

        root -> copies: y_r = x_root. On the other ranks x only shows shape and dtype, and its gradient is zero. Under
        `loss="replicated"` the adjoint keeps the root's gradient, and moves nothing.

        Raises:
            ValueError: on every rank, if shape, dtype or `root` differ between ranks, or `root` is not a rank of this
                communicator.
        """
        call, _ = self._enter("broadcast", x, lambda: {"root": self._checked_rank("root", root)}, check)
        return self._apply(call, maps.Broadcast(self.transport, root, self.loss), x)

    @collective
    def reduce(self, x: Tensor, op: str = "sum", *, root: int = 0, check: bool | None = None) -> Tensor:
        """Reduce the ranks' tensors, the result on rank `root` and zeros elsewhere; adjoint: :meth:`broadcast`.

        partial -> root: y_root = sum_r x_r.

        Args:
            x: the same shape and dtype on every rank.
            op: "sum" or "avg"; also "max", "min" and "prod", by an all_reduce.
            root: the rank that receives the result.
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if shape, dtype, `op` or `root` differ between ranks, `op` does not suit the
                dtype, or `root` is not a rank of this communicator.
        """

        def state() -> dict[str, Any]:
            return {"root": self._checked_rank("root", root), "op": checked_op(op, x, OPS)}

        call, _ = self._enter("reduce", x, state, check)
        if op in SUMS:
            return self._apply(call, maps.Reduce(self.transport, root, self._scale(op)), x)
        with call.gradients():
            y = reduce_nonlinearly(x, op, call, "sum")
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

        sharded -> root: y_root = concat_r x_r.

        Args:
            x: n_r entries along `dim` on rank r; n_r may differ between ranks and may be 0, other dimensions may not.
            root: the rank that receives them.
            counts: as in :meth:`all_gather`.
            check: as in :meth:`all_gather`.
            dim: the dimension along which the ranks' tensors are joined.

        Returns:
            sum_r n_r entries along `dim` on rank `root`, 0 elsewhere; a gradient of those is ignored.

        Raises:
            ValueError: as in :meth:`all_gather`; also if `root` differs between ranks or is no rank.
        """
        call, counts = self._enter_rows("gather", x, counts, dim, check, root=root)
        return self._apply(call, maps.gather(self.transport, counts, root), x, dim)

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
        """Give each rank its part of the tensor of rank `root`; adjoint: :meth:`gather`.

        root -> sharded: y_r = x_root[rows r].

        Args:
            x: on rank `root`, sum_r n_r entries along `dim`. On the others None, or a tensor of the same dtype and
                other dimensions, on the device of the result; its gradient is zero.
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
        call, x, counts = self._enter_scatter(x, root, counts, dim, check)
        with call.gradients():
            x = x if self.rank == root else x.narrow(dim, 0, 0)
        return self._apply(call, maps.scatter(self.transport, counts, root), x, dim)

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
        """Send part q of x to rank q and join the received parts, rank 0's first; adjoint: itself, counts exchanged.

        sharded -> sharded: y_r = concat_q (x_q's part for r).

        Args:
            x: the parts for rank 0, 1, ... along `dim`; other dimensions are the same on all ranks.
            send_counts: how many entries go to each rank; by default as evenly as possible.
            receive_counts: how many come from each rank, where the caller knows; None: a handshake finds out.
            dim: the dimension that is distributed and joined.
            check: as in :meth:`all_gather`.

        Raises:
            ValueError: on every rank, if dtype or other dimensions differ between ranks, or the counts of the two ends
                contradict each other or x.
        """
        call, sent, received = self._enter_all_to_all(x, send_counts, receive_counts, dim, check)
        return self._apply(call, maps.AllToAll(self.transport, sent, received), x, dim)

    @eager
    def send(self, x: Tensor, dest: int, *, tag: int = 0) -> None:
        """Send x to rank `dest`; adjoint: :meth:`recv` of its gradient from there.

        Nothing leads from here to a loss, so the backward pass starts with :meth:`backward`.

        Raises:
            ValueError: if `dest` is no rank or `tag` is out of range; with checking, at both ends, if dtype or shape
                differ between them.
        """
        self.isend(x, dest, tag=tag).wait()

    @eager
    def recv(self, like: Tensor, source: int, *, tag: int = 0) -> Tensor:
        """Receive a tensor with the shape, dtype and device of `like` from rank `source`; adjoint: :meth:`send`.

        Raises:
            ValueError: if `source` is no rank or `tag` is out of range; with checking, at both ends, if dtype or shape
                differ between them.
        """
        y = self.irecv(like, source, tag=tag).wait()
        assert y is not None
        return y

    @eager
    def isend(self, x: Tensor, dest: int, *, tag: int = 0) -> Handle:
        """Start a :meth:`send`; adjoint of start and wait: wait and start of a recv."""
        self._checked_rank("dest", dest)
        call, end, verify = self._enter_message(f"isend to rank {dest}", x, End(True, dest, tag))
        return self._start(call, Send(self.transport, end, x.shape), x, verify=verify, arrange=lambda _: None)

    @eager
    def irecv(self, like: Tensor, source: int, *, tag: int = 0) -> Handle:
        """Start a :meth:`recv`; adjoint of start and wait: wait and start of a send."""
        self._checked_rank("source", source)
        call, end, verify = self._enter_message(f"irecv from rank {source}", like, End(False, source, tag))
        return self._start(call, Recv(self.transport, end, like.shape), like.detach().new_empty(0), verify=verify)

    @eager
    def wait(self, handle: Handle) -> Tensor | None:
        """Wait for a nonblocking operation and return its result, None for a send: `handle.wait()`.

        Raises:
            ValueError: if `handle` is not a handle of this communicator, or has been waited for already.
        """
        if not isinstance(handle, Handle) or handle not in self._handles:
            raise ValueError(f"handle must be one that this communicator returned, got {shown(handle)}")
        return handle.wait()

    @collective
    def split(self, color: int | None) -> Communicator | None:
        """Return the communicator of the ranks with the same `color`, in their order here; None for `color=None`.

        Collective over this communicator. The parts share its settings, and its order: :meth:`backward` of any of
        them covers the calls of all. A part holds descriptors and threads of this process (torch.distributed), or one
        of a limited number of communicators (MPI), until it is closed: by :meth:`close`, or by
        `with comm.split(color) as part:`. Without NCCL and MPI they also end with the last reference to the part.

        Raises:
            ValueError: on every rank, if a color is neither an integer nor None.
        """

        def state() -> Facts:
            if color is not None:
                check_integer("color", color, minimum=-(2**63), maximum=2**63 - 1, detail="or None")
            return {"color": color, "name": uuid4().hex}

        self.transport.check_open()
        everyone = self.handshake(state, caller="split")
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
        """End this communicator: any later use is a ValueError, and closing it again does nothing.

        A communicator that :meth:`split` made ends its process group, or frees its MPI communicator. That is
        collective over it: every rank closes it, after its last operation and the backward passes of its operations.
        The group of any other belongs to the caller, who made it: it stays as it is, and nothing is collective.

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
        """Close the communicator; after an error on this rank alone, without waiting for the other ranks."""
        if error is None:
            self.close()
        elif any(handle.under_way for handle in self._handles):
            Transport.close(self.transport)
            ABANDONED.append(self.transport)  # ending the group would wait for the operations under way
        else:
            self.transport.close()

    def _state_at_close(self) -> Facts:
        """Return no facts; raise ValueError if an operation has not ended."""
        self._refuse_dropped_handles()
        under_way = sorted(handle.name for handle in self._handles if handle.under_way)
        if under_way:
            raise ValueError(f"operations are under way: {', '.join(under_way)}; wait for each before close()")
        return {}

    @collective
    def backward(
        self, loss: Tensor | None = None, gradient: Tensor | None = None, *, retain_graph: bool = False
    ) -> None:
        """Run backward of this rank's loss, and of every call of this communicator since the last backward pass.

        Every rank calls this, with None where there is no loss. The adjoints run in exactly the reverse order of the
        calls, so that ranks with different graphs, or without a loss, meet in every one of them. Parts made by
        :meth:`split` take part.

        Args:
            loss: this rank's scalar, or None. The communicator's `loss` determines the scalar that is differentiated.
            gradient: the objective's gradient with respect to `loss`, by default 1.
            retain_graph: keep the graph for another backward pass; the same on all ranks.

        Raises:
            ValueError: with checking, on every rank: if there is nothing to differentiate (`loss` requires no gradient,
                and no call waits for one), if `loss` is no scalar and has no `gradient`, if a handle was dropped,
                if different collectives of this communicator wait for the backward pass on different ranks, or if
                `retain_graph` is not the same on all.
        """
        self.transport.check_not_closed()

        def state() -> Facts:
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
            self.handshake(state, caller="backward", must_match=(_WAITING, "retain_graph"))
        else:
            state()
        self._order.backward(loss, gradient, retain_graph)

    def _apply(self, call: Call, map: maps.LinearMap, x: Tensor, dim: int = 0) -> Tensor:
        """Return map(x), with the rows of x along `dim`."""
        with call.gradients():
            y = autograd.apply(map, x.movedim(dim, 0) if dim else x, call)
            return y.movedim(0, dim) if dim else y

    def _start(
        self,
        call: Call,
        map: maps.LinearMap,
        x: Tensor,
        dim: int = 0,
        *,
        verify: Callable[[], bool] | None = None,
        arrange: Callable[[Tensor], Tensor | None] | None = None,
    ) -> Handle:
        """Start map(x), with the rows of x along `dim`, and return its handle.

        The wait calls `verify`, which checks that the ranks agree and returns whether the operation joins the backward
        pass. Then `arrange` turns the map's output into the result; by default the rows go back to `dim`.
        """
        with call.gradients():
            flight, ticket = autograd.start(map, x.movedim(dim, 0) if dim else x, call)
        if arrange is None:
            arrange = (lambda y: y.movedim(0, dim)) if dim else (lambda y: y)
        if call.collective and call.check is True:
            verify = partial(self._verify_wait, call)
        handle = Handle(flight, ticket, x, verify=verify, arrange=arrange, on_drop=self._count_dropped)
        self._handles.add(handle)
        return handle

    def _scale(self, op: str) -> float:
        return 1.0 if op == "sum" else 1.0 / self.size

    def _verify_wait(self, call: Call) -> bool:
        """Check that all ranks wait for the same nonblocking collective: their adjoints start in the same order."""
        self.handshake(dict, caller=f"wait for {call.name}")
        return True

    def _count_dropped(self, name: str) -> None:
        """Remember an operation whose handle was dropped; the next call reports it."""
        self._dropped.append(name)
