"""A device without hardware, "card": its tensors compute on the CPU, and refuse those of the CPU as a GPU's do.

`register` comes before the first backward pass of a process, and lasts as long. A tensor without dimensions may come
from the CPU, and an index as well. Nothing here has a stream, memory of its own or kernels.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

ops = torch.ops.aten
_READ = ops._local_scalar_dense.default
_CROSSING = (ops._to_copy.default, ops.copy_.default, ops._copy_from.default, _READ)
_INDEXING = (ops.index.Tensor, ops.index_put.default, ops.index_put_.default, ops._index_put_impl_.default)
_FACTORIES = ("empty.memory_format", "empty_strided", "arange", "arange.start", "arange.start_step", "linspace", "eye")


class _Module(backend_registration._DummyBackendModule):
    """The functions that torch calls for any device: a module `torch.card`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: int = 0) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: int = 0) -> None:
        torch.set_rng_state(state)


class OnCard(Tensor):
    """A tensor of the card; its numbers are those of `host`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host: Tensor) -> OnCard:
        layout = (host.shape, host.stride(), host.storage_offset())
        return Tensor._make_wrapper_subclass(cls, *layout, dtype=host.dtype, device="card:0")

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.host})"

    def tolist(self) -> Any:
        return self.host.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return an operation's result, computed on the CPU."""
    tensors = [x for x in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(x, Tensor)]
    of_cpu = [x for x in tensors if not isinstance(x, OnCard) and x.dim()]
    if of_cpu and func not in _CROSSING and not (func in _INDEXING and isinstance(args[0], OnCard)):
        raise RuntimeError(f"{func}: a tensor of the card meets one of the CPU, of shape {tuple(of_cpu[0].shape)}")
    args, kwargs = pytree.tree_map_only(OnCard, lambda x: x.host, (args, kwargs))
    on_card = func is not _READ and (func is not ops.copy_.default or isinstance(tensors[0], OnCard))
    if kwargs.get("device") is not None:
        on_card, kwargs["device"] = kwargs["device"].type == "card", torch.device("cpu")
    found = func(*args, **kwargs)
    in_place = {id(x.host if isinstance(x, OnCard) else x): x for x in tensors}

    def result(x: Tensor) -> Tensor:
        if not on_card:
            return x
        back = in_place[id(x)] if id(x) in in_place else OnCard(x)
        assert back.shape == x.shape, f"{func} has changed a size, which this stand-in cannot"
        return back

    return pytree.tree_map_only(Tensor, result, found)


def _factory(func: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Tensor:
        return OnCard(func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False}))

    return make


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    _computed(ops.copy_.default, (target, source), {})
    return target


@cache
def register() -> torch.library.Library:
    """Register the device; what it implements is removed with the library that is returned."""
    torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter stays the same object, as on a GPU
    backend_registration._setup_privateuseone_for_python_backend("card", _Module())
    library = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        library.impl(name, _factory(getattr(getattr(ops, packet), overload or "default")), "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    return library


def to_card(tree: Any) -> Any:
    """Return arguments whose tensors are new leaves on the card, and whose modules have been moved there."""

    def moved(x: Any) -> Any:
        if isinstance(x, nn.Module):
            return x.to("card")
        if isinstance(x, nn.Parameter):
            return nn.Parameter(x.detach().to("card"))
        return x.detach().to("card").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x

    return pytree.tree_map(moved, tree)
