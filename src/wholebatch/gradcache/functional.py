"""Gradient caching for a loop that assembles a large batch from small ones: decorators of the encoder and the loss.

@cached                              @cat_input_tensor
def encode(model, x): ...            def loss_fn(a, b): ...

for x in loader:                     loss = loss_fn(representations)
    r, again = encode(model, x)      loss.backward()
    ...                              for again, r in ...: again(r)
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn

from .._base.checks import check_callable, check_integer
from .._base.graph import leaves_of
from ..comm import Communicator, Group, select_communicator
from ..comm.binding import complaint, mistake_of
from ..comm.select import check_group
from .chunks import differentiable
from .engines.known import Synchronized
from .engines.lost_gradients import check_not_passed_by, live_engines, watched
from .inputs.trees import new_containers, representations
from .observe import Calls, Observer, modules_of
from .one_pass import backward, difference, switched, with_graph
from .replay import Buffers, Replay, without_graph

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PENDING: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[_SecondPass]] = weakref.WeakKeyDictionary()


def cached(
    func: Callable[_P, Tensor | Sequence[Tensor]],
) -> Callable[_P, tuple[Any, ...]]:  # tensors, and the function `again` as the last
    r"""Decorate a function that calls a model: it returns representations without a graph, and a second-pass function.

    `func(*args, **kwargs)` returns r; the decorated function returns `(r, ..., again)`.

    Each r is a leaf that requires a gradient. After the loss's backward pass, call `again(r, ...)`, or `again` with a
    list of them. It calls func once more, with the random numbers, autocast state and buffers of the first call, and
    goes backward from r.grad. An engine such as DDP synchronizes its module in the last `again` that is outstanding for
    it. So call `again` for every r that has a gradient, and call each such module at least once on every rank. There
    are no handshakes: an error raises on its rank only.

    Args:
        func: returns a tensor, or a tuple of them.

    Raises:
        ValueError: from func's first call, if it returns something else; from `again`, if an r has no gradient, or if
            func bypasses the DistributedDataParallel that holds its parameters (checked once).
        RuntimeError: from `again`, if the second representation differs from the first; then discard all gradients.

    Source: Gao et al., 2021, arXiv:2101.06983.

    >>> import torch, wholebatch as wb
    >>> encoder, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> encode = wb.gradcache.cached(lambda model, x: model(x))
    >>> r, again = encode(encoder, x)
    >>> r.square().sum().backward()
    >>> again(r)
    >>> encoder.bias.grad.shape
    torch.Size([2])
    """
    check_callable("func", func)
    unchecked = [True]  # whether engines have still to be checked

    @wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> tuple[Any, ...]:
        again = _SecondPass(func, args, kwargs, unchecked)
        return (*again.leaves(), again)

    return call


class _SecondPass:
    """The function `again` of one call: its second pass."""

    def __init__(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], unchecked: list[bool]
    ) -> None:
        self._unchecked = unchecked
        self._name = getattr(func, "__name__", type(func).__name__)
        self._call = lambda: representations(func(*new_containers(args), **new_containers(kwargs)), self._name)[0]
        self._buffers, self._done = Buffers(), False
        self._replay = Replay(self._buffers)
        modules = [x for x in (*args, *kwargs.values()) if isinstance(x, nn.Module)]
        visible = modules_of(func, *modules)
        calls = Calls()
        with Observer(self._buffers).call(calls, func, *modules, visible=visible) as self._engines, without_graph():
            self._first = self._call()
        self._seen = calls.seen.values()
        for engine in self._engines:
            if engine.control.coalesce is not None:
                raise ValueError(
                    f"{self._name} calls the engine {type(engine.module).__name__}, which reduces all passes of a step "
                    "together, and `cached` makes them one by one: use wb.GradCache, or wb.gradcache.encode"
                )
        self._buffers.find_moved()
        self._buffers.forget_still()
        for engine in self._engines:
            _PENDING.setdefault(engine.module, weakref.WeakSet()).add(self)

    def leaves(self) -> list[Tensor]:
        """Return the representations, as leaves."""
        reps = [x.detach() for x in self._first]
        leaves = [x.requires_grad_() if differentiable(x) else x for x in reps]
        self._leaves = [weakref.ref(x) for x in leaves]
        return leaves

    def outstanding(self) -> bool:
        """Return whether a representation has a gradient, from which this pass has still to go backward."""
        leaves = [leaf() for leaf in self._leaves]
        return any(leaf is not None and leaf.grad is not None for leaf in leaves)

    def __call__(self, *leaves: Tensor | Sequence[Tensor]) -> None:
        flat_leaves = [x for leaf in leaves for x in ([leaf] if isinstance(leaf, Tensor) else leaf)]
        if self._done:
            raise ValueError(f"this call of {self._name} has had its second pass already, and its gradient is counted")
        if len(flat_leaves) != len(self._first):
            raise ValueError(f"{self._name} gave {len(self._first)} representations, got back {len(flat_leaves)}")
        for number, leaf in enumerate(flat_leaves):
            if differentiable(leaf) and leaf.grad is None:
                raise ValueError(
                    f"representation {number} of {self._name} has no gradient: call the loss's backward first, and "
                    "pass the tensor that came with this function"
                )
            if leaf is not self._leaves[number]():
                raise ValueError(f"representation {number} is not the one that came with this call of {self._name}")
        self._done = True
        checks, self._unchecked[0] = self._unchecked[0], False
        held, last = list[Synchronized](), list[Synchronized]()
        for engine in self._engines:
            pending = _PENDING[engine.module]
            pending.discard(self)
            (held if any(other.outstanding() for other in pending) else last).append(engine)
        with ExitStack() as stack:
            stack.enter_context(self._buffers.kept())
            stack.enter_context(switched(held, last))
            with self._replay.again():
                second = with_graph(self._call, self._name)
            wrong = difference(self._first, second, self._name)
            both = zip(second, flat_leaves, strict=True) if wrong is None else ()
            pairs = [(x, y.grad) for x, y in both if x.requires_grad and y.grad is not None]
            if pairs and checks:
                check_not_passed_by(self._name, leaves_of(second), self._seen, self._engines, live_engines)
            with watched(held if checks else ()) as mistakes:
                backward(pairs, held, last)
        if wrong is not None or mistakes:
            raise wrong or mistakes[0]


def cat_input_tensor(func: Callable[..., _R]) -> Callable[..., _R]:
    """Decorate a loss: each argument that is a list of tensors becomes one tensor of all their rows.

    >>> import torch, wholebatch as wb
    >>> wb.gradcache.cat_input_tensor(lambda x, y: x.shape[0] + y.shape[0])([torch.ones(2, 1)] * 2, y=torch.ones(3, 1))
    7
    """
    check_callable("func", func)

    @wraps(func)
    def call(*args: object, **kwargs: object) -> _R:
        return func(*map(_joined, args), **{name: _joined(x) for name, x in kwargs.items()})

    return call


def _joined(x: object) -> object:
    if isinstance(x, list | tuple) and x and all(isinstance(part, Tensor) for part in x):
        return torch.cat([*x])
    return x


@overload
def gather_input_tensor(func: Callable[_P, _R], axis: int = 0, *, group: Group = None) -> Callable[_P, _R]: ...


@overload
def gather_input_tensor(
    func: None = None, axis: int = 0, *, group: Group = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...


def gather_input_tensor(
    func: Callable[_P, _R] | None = None, axis: int = 0, *, group: Group = None
) -> Callable[_P, _R] | Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Decorate a loss: tensors are joined with those of all ranks, rank 0's first, along an axis.

    Every rank then computes the same loss L of all rows, and its local rows get the gradient dL/dx_r. An engine that
    averages needs `loss * world_size`. The losses of this library need neither this decorator nor that factor.

    Collective: a handshake and an all-gather for each tensor. Rows may differ between ranks.

    Args:
        func: the loss.
        axis: the dimension along which tensors are joined.
        group: ranks that share the batch, as in :func:`wholebatch.functional.clip_loss`.

    Raises:
        ValueError: on every rank, if tensors differ in dtype or in another dimension than `axis`, if one rank's
            arguments do not fit `func`, or if a launcher has started several processes and there is no process group.
    """
    check_integer("axis", axis, minimum=-64, maximum=63)
    check_group(group)
    if func is None:
        return lambda func: gather_input_tensor(check_callable("func", func), axis, group=group)
    check_callable("func", func)

    signature = inspect.signature(func)

    @wraps(func)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        comm = Communicator(select_communicator(group).transport, loss="replicated")
        mistake = mistake_of(signature, args, kwargs)
        if mistake is not None and any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            comm.handshake(complaint(mistake), caller="gather_input_tensor")  # the others are in their first all-gather

        def gather(x: Any) -> Any:
            return comm.all_gather(x, dim=axis) if isinstance(x, Tensor) and x.dim() else x

        return func(*map(gather, args), **{name: gather(x) for name, x in kwargs.items()})

    return call
