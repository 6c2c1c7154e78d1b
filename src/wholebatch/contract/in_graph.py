"""Losses inside compiled graphs: each call of a loss is one operator, whose backward pass is another.

When Dynamo traces a call, its tensors and the parameters of its modules become inputs of `wholebatch::loss`; all else
is kept here under a number. The operator runs the eager loss on copies of the tensors and on the modules themselves,
and returns the loss and a token. Autograd saves the token for `wholebatch::loss_backward`; the graph of the eager loss
lives as long as the storage of the token.

A compiler may write into the memory of a tensor that its graph no longer needs. So no input and no result of an
operator shares memory with what the eager graph has saved, except for parameters.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from .._base.precision import accumulation_dtype
from .._base.trees import map_leaves


class _Call(NamedTuple):
    """A call of a loss in a compiled graph."""

    loss: Callable[..., Tensor]
    arguments: Any  # args and kwargs, with positions and keys instead of tensors, numbers and objects
    autocast: list[tuple[str, bool, torch.dtype]]


class _Graph(bytearray):
    """The memory of a token, with the graph of an eager loss."""

    loss: Tensor
    leaves: list[Tensor]


_numbers = count()
_calls: dict[int, _Call] = {}
_kept: dict[str, Callable[[], Any]] = {}
_graphs: WeakValueDictionary[int, _Graph] = WeakValueDictionary()
_KEYS = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()  # with autograd


def traced(loss: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Return the result of the operator, None where the graph must break. Dynamo reads this function, it never runs."""
    tensors: list[Tensor] = []
    modules: list[nn.Module] = []
    refused: list[Any] = []

    def placed(leaf: Any) -> int | str:
        """Return a tensor's position, -1 - position for a number, which becomes a tensor, or the key of an object."""
        number = isinstance(leaf, int | float) and not isinstance(leaf, bool)
        if number:  # not kept, because it may differ between calls of one graph
            leaf = torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else torch.int64, device="cpu")
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            return -len(tensors) if number else len(tensors) - 1
        if isinstance(leaf, nn.Module):
            modules.append(leaf)
        elif leaf is None or isinstance(leaf, bool | str) or type(leaf).__module__.startswith("torch"):
            return _keep(leaf)
        key = _keep_object(id(leaf))  # torch 2.11 passes no other objects to the functions that it calls
        if not key:
            refused.append(leaf)
        return key

    arguments = map_leaves(placed, (args, kwargs))
    features = [index for index, x in enumerate(tensors) if x.is_floating_point() and x.dim() > 1]
    if refused or not features or any(getattr(module, "gradients_are_sparse", False) for module in modules):
        return None
    tensors += _learned_by(modules)
    owner = modules[0] if modules else None
    reduction = kwargs.get("reduction", getattr(getattr(owner, "options", owner), "reduction", "mean"))
    learned = [torch.is_grad_enabled() and x.requires_grad for x in tensors]
    call = _register(loss, arguments, tuple({x.device.type for x in tensors}))
    return torch.ops.wholebatch.loss(tensors, call, learned, features[0], reduction == "none")[0]


def _learned_by(modules: Sequence[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers that get a gradient, each once."""
    learned: list[Tensor] = []
    for module in modules:
        for x in (*module.parameters(), *module.buffers()):
            if x.requires_grad and not any(x is other for other in learned):
                learned.append(x)
    return learned


def _keep(leaf: object) -> str:
    """Keep an object, not alive where it can be referred to weakly, and return its key; Dynamo calls this."""
    key = f"object {next(_numbers)}"
    try:
        _kept[key] = ref(leaf)  # the graph's guards keep it alive as long as the graph runs
    except TypeError:
        _kept[key] = lambda: leaf
    return key


def _keep_object(address: int) -> str:
    """Keep the object with this id, which Dynamo holds; return "" for one that the compiled function makes.

    Such an object has no attributes while Dynamo traces, or its id is that of something of Dynamo's in its place.
    """
    leaf = ctypes.cast(address, ctypes.py_object).value
    temporary = not getattr(leaf, "__dict__", None) or type(leaf).__module__.startswith("torch._dynamo")
    return "" if temporary else _keep(leaf)


def _register(loss: Callable[..., Tensor], arguments: Any, devices: tuple[str, ...]) -> int:
    """Keep a call with the autocast around it, and return its number; Dynamo calls this."""
    _keep_order()
    available = [device for device in devices if torch.amp.is_autocast_available(device)]
    autocast = [(x, torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in available]
    number = next(_numbers)
    _calls[number] = _Call(loss, arguments, autocast)
    return number


for _constant in (_keep, _keep_object, _register):  # torch.compiler.assume_constant_result would import Dynamo
    setattr(_constant, "_dynamo_marked_constant", True)  # noqa: B010  # mypy knows no such attribute


@cache
def _keep_order() -> Any:
    """Keep compilers from removing or reordering losses, which communicate; its import is for compiling alone."""
    from torch._library.effects import EffectType

    for name in ("loss", "loss_backward"):
        _library._register_effectful_op(f"wholebatch::{name}", EffectType.ORDERED)
    return EffectType.ORDERED


def _loss(
    tensors: Sequence[Tensor], call: int, learned: Sequence[bool], features: int, rows: bool
) -> tuple[Tensor, Tensor]:
    """Run a loss, and return it and a token.

    Args:
        tensors: those of the call, then the parameters of its modules.
        call: the number of the call.
        learned: whether each tensor gets a gradient.
        features: their position.
        rows: whether the loss is one number for each row of the features.
    """
    loss, arguments, autocast = _calls[call]
    leaves = list(tensors)
    modules: list[nn.Module] = []

    def argument(leaf: int | str) -> Any:
        if isinstance(leaf, str):
            kept = _kept[leaf]()
            if isinstance(kept, nn.Module):
                modules.append(kept)
            return kept
        if leaf < 0:
            return tensors[-1 - leaf].item()
        leaves[leaf] = tensors[leaf].detach().clone().requires_grad_(learned[leaf])
        return leaves[leaf]

    with ExitStack() as as_eager:
        as_eager.enter_context(torch._C._ForceDispatchKeyGuard(*_KEYS))
        for device, enabled, dtype in autocast:
            as_eager.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        as_eager.enter_context(torch.set_grad_enabled(any(learned)))
        args, kwargs = map_leaves(argument, arguments)
        parameters = _learned_by(modules)
        if any(parameter._backward_hooks for parameter in parameters):
            raise RuntimeError(
                "a parameter of a loss in a compiled graph has a hook, which would run twice; use "
                "register_post_accumulate_grad_hook, or call the loss outside of torch.compile"
            )
        leaves[len(leaves) - len(parameters) :] = parameters
        result = loss(*args, **kwargs)
        shape, dtype = _form(tensors[features], rows)
        if (result.shape, result.dtype) != (shape, dtype):
            raise RuntimeError(
                f"the result of a loss in a compiled graph must be {dtype} of shape {tuple(shape)}, "
                f"as the compiler expects of its features, got {result.dtype} of shape {tuple(result.shape)}; cast the "
                "features to the dtype of the loss's parameters, or call the loss outside of torch.compile"
            )
        graph, number = _Graph(8), next(_numbers)
        graph.loss, graph.leaves = result, [x for x, needed in zip(leaves, learned, strict=True) if needed]
        _graphs[number] = graph
        return result.detach().clone(), torch.frombuffer(graph, dtype=torch.int64).fill_(number)


def _form(features: Tensor, rows: bool) -> tuple[torch.Size, torch.dtype]:
    """Return the shape and the dtype of a loss."""
    return features.shape[: int(rows)], accumulation_dtype(features.dtype)


def _keep_order_in_inductor() -> None:
    """Make inductor keep the order: torch 2.11 to 2.13 note it by names of buffers and look for names of operations."""
    lowering = sys.modules.get("torch._inductor.lowering")  # imported before inductor traces
    for name in ("loss", "loss_backward"):
        operator = getattr(torch.ops.wholebatch, name).default
        if lowering is not None and operator not in lowering.lowerings:
            lowering.register_lowering(operator, type_promotion_kind=None)(partial(_lowered, lowering, operator))


def _lowered(lowering: Any, operator: Any, *args: Any) -> Any:
    graph = lowering.V.graph
    before, first = graph.effectful_ops.get(_keep_order()), len(graph.operations)
    results = lowering.fallback_handler(operator, add_to_fallback_set=False)(*args)
    dependencies: Any = getattr(graph, "additional_star_deps", None)  # torch 2.15 keeps the order itself
    for operation in graph.operations[first:] if before is not None and dependencies is not None else ():
        dependencies[operation.get_operation_name()].add(before.get_name())
    return results


def _fake_loss(
    tensors: Sequence[Tensor], call: int, learned: Sequence[bool], features: int, rows: bool
) -> tuple[Tensor, Tensor]:
    _keep_order_in_inductor()
    shape, dtype = _form(tensors[features], rows)
    return tensors[features].new_empty(shape, dtype=dtype), torch.empty(1, dtype=torch.int64, device="cpu")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, _, learned, _, _ = inputs
    ctx.learned = learned
    ctx.save_for_backward(output[1], *(x for x, needed in zip(tensors, learned, strict=True) if needed))


def _backward(ctx: Any, grad: Tensor, _token: Tensor) -> tuple[Any, ...]:
    token, *tensors = ctx.saved_tensors
    gradients = iter(torch.ops.wholebatch.loss_backward(token, grad, tensors))
    return [next(gradients) if needed else None for needed in ctx.learned], None, None, None, None


def _loss_backward(token: Tensor, grad: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of the loss with this token, as the eager backward pass computes them."""
    graph = _graphs.get(int(token))
    if graph is None:
        raise RuntimeError("the graph of a compiled loss has been freed; its token must not be copied, nor its storage")
    again = torch._C._autograd._get_current_graph_task_keep_graph()
    with torch._C._ForceDispatchKeyGuard(*_KEYS):
        gradients = torch.autograd.grad(graph.loss, graph.leaves, grad, retain_graph=again, allow_unused=True)
    results, used = list[Tensor](), {grad.untyped_storage().data_ptr()}
    for x, gradient in zip(tensors, gradients, strict=True):
        result = torch.zeros_like(x) if gradient is None else gradient.contiguous()
        memory = result.untyped_storage().data_ptr()
        results.append(result.clone() if again or memory in used else result)
        used.add(memory)
    return results


def _fake_gradients(_token: Tensor, _grad: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


_library = torch.library.Library("wholebatch", "DEF")
_library.define("loss(Tensor[] tensors, int call, bool[] learned, int of, bool rows) -> (Tensor, Tensor)")
_library.define("loss_backward(Tensor token, Tensor grad, Tensor[] tensors) -> Tensor[]")
_library.impl("loss", _loss, "CompositeExplicitAutograd")
_library.impl("loss_backward", _loss_backward, "CompositeExplicitAutograd")
torch.library.register_fake("wholebatch::loss", _fake_loss, lib=_library)
torch.library.register_fake("wholebatch::loss_backward", _fake_gradients, lib=_library)
torch.library.register_autograd("wholebatch::loss", _backward, setup_context=_save, lib=_library)
