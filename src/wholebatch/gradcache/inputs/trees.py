"""The input of a model, a tree of tensors that is cut along the batch, and its output: representations.

    tensor                  model(x)                    list or tuple           model(*x)
    mapping                 model(**x), or model(x)     (list, mapping)         model(*x[0], **x[1])

A model that cannot take a mapping's keys as keywords, but one argument, gets the mapping itself. Its signature decides;
it is not called to find out. A wrapper such as DistributedDataParallel, whose forward takes anything, has the signature
of the module inside.

    def forward(self, input_ids, attention_mask)     keywords
    def forward(self, **features)                    keywords
    def forward(self, input, **kwargs)               the mapping itself, unless it has the key "input"

Mappings are dict, UserDict, BatchEncoding and the like; trees nest, and a chunk's containers have the types of the
input's. Every tensor in a tree has the batch's rows, except those of shape (). Every chunk gets these, and whatever is
no tensor.
"""

from __future__ import annotations

import inspect
from collections import UserDict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor, nn

from ..._base.checks import check_dense
from ..._base.trees import leaves, tensors_of


def is_flat_list(tree: Any) -> bool:
    """Return whether this is a list that holds no tensors or containers."""
    return isinstance(tree, list | tuple) and not any(isinstance(x, Tensor | Mapping | list | tuple) for x in tree)


def check_input(tree: Any, name: str, chunk_size: int) -> int:
    """Return the rows of an input that can be cut into chunks, of which it has several beyond this size.

    Tensors that disagree on their rows, have a graph, or lie beside a list with one item per row are a ValueError.
    """
    for tensor in tensors_of(tree):
        check_dense(f"a tensor of {name}, which is cut into chunks (a split_input_fn may cut others),", tensor)
    rows = rows_of(tree, name)
    check_no_graph(tree, name)
    for _, leaf in leaves(tree, is_leaf=is_flat_list):
        if isinstance(leaf, list | tuple):
            check_no_list_of_rows(leaf, rows, name, chunk_size)
    return rows


def check_no_graph(tree: Any, name: str) -> None:
    """Raise ValueError if a tensor of an input has a graph."""
    if any(x.grad_fn is not None for x in tensors_of(tree)):
        raise ValueError(
            f"{name} has a graph, which each of its chunks would go back through: make its origin part of the model, "
            "or detach it"
        )


def check_no_list_of_rows(x: Sequence[Any], rows: int, name: str, chunk_size: int) -> None:
    """Raise ValueError if a list of an input has as many items as there are rows, and there are several chunks."""
    if len(x) == rows > chunk_size:
        raise ValueError(
            f"{name} holds a list of {rows} things that are no tensors, as many as there are rows: is there "
            "one for each row? A split_input_fn(input, chunk_size) can cut them too"
        )


def rows_of(tree: Any, name: str) -> int:
    """Return the number of rows of the batch; raise ValueError if there is no tensor with rows, or two disagree."""
    sizes = [len(x) for x in tensors_of(tree) if x.dim()]
    if not sizes:
        raise ValueError(
            f"{name} must hold tensors with the rows of the batch, got {type(tree).__name__}; another input takes a "
            "split_input_fn(input, chunk_size)"
        )
    if len(set(sizes)) > 1:
        fix = "; images: pass split_input_fn=wholebatch.gradcache.MultimodalSplit(image_token_id=...)"
        fix = fix if any("pixel_values" in path for path, _ in leaves(tree)) else ""
        raise ValueError(f"all tensors of {name} must have the rows of the batch, got {sizes} rows{fix}")
    return sizes[0]


def new_containers(tree: Any) -> Any:
    """Return the same tensors in new containers, with the attributes of the old ones.

    Some models write their results into their input, as sentence-transformers' modules do. In a mapping that outlives
    the call, these results would stay in memory.
    """
    if isinstance(tree, dict | UserDict):
        local = copy(tree)
        for name, value in tree.items():
            local[name] = new_containers(value)
        return local
    if type(tree) in (list, tuple):
        return type(tree)(map(new_containers, tree))
    return tree


def call_model(model: Callable[..., Any], x: Any) -> Any:
    """Return the model's output for one chunk."""
    if isinstance(x, Mapping):
        return model(x) if takes_mapping(model, x) else model(**x)
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], list | tuple) and isinstance(x[1], Mapping):
        return model(*x[0], **x[1])
    if isinstance(x, list | tuple):
        return model(*x)
    return model(x)


def representations(output: Any, name: str) -> tuple[tuple[Tensor, ...], Callable[[Sequence[Any]], Any]]:
    """Return the tensors of a representation, and a function that makes a representation of this form from tensors."""
    if isinstance(output, Tensor):
        return (output,), lambda tensors: tensors[0]
    if isinstance(output, Sequence) and output and all(isinstance(x, Tensor) for x in output):
        return tuple(output), (lambda tensors: type(output)(*tensors)) if hasattr(output, "_fields") else tuple
    names = [key for key, x in output.items() if isinstance(x, Tensor)] if isinstance(output, Mapping) else []
    example = f"output[{names[0]!r}]" if names else "output.pooler_output"
    having = f" with tensors {', '.join(map(repr, names))}" if names else ""
    raise ValueError(
        f"{name} must return a tensor, or a tuple of tensors, got {type(output).__name__}{having}; "
        f"get_rep_fn=lambda output: {example}, for example, takes the representation out of it"
    )


_INSIDE = ("_orig_mod", "module", "_fsdp_wrapped_module", "_forward_module")  # of torch.compile, engines and Fabric


def takes_mapping(model: Callable[..., Any], mapping: Mapping[Any, Any]) -> bool:
    """Return whether a model cannot take the mapping as keywords, but as its one positional argument.

    >>> takes_mapping(lambda features: features, {"x": 1}), takes_mapping(lambda x: x, {"x": 1})
    (True, False)
    """
    signature = _signature_of(model)
    if signature is None:
        return False
    try:
        signature.bind(**mapping)
    except TypeError:  # a key is no argument, or no string, or an argument has no key
        try:
            signature.bind(mapping)
        except TypeError:
            return False
        return True
    return False


def _signature_of(model: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a model, or of the module in a wrapper; None if Python does not know it."""
    called: Callable[..., Any] = model
    if isinstance(model, nn.Module) and type(model).__call__ is nn.Module.__call__:
        called = model.forward
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return None
    if isinstance(model, nn.Module) and (_takes_anything(signature) or "_orig_mod" in model._modules):
        inside = (getattr(model, name, None) for name in _INSIDE)
        module = next((x for x in inside if isinstance(x, nn.Module)), None)
        if module is not None:
            return _signature_of(module)
    return signature


def _takes_anything(signature: inspect.Signature) -> bool:
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    return kinds == {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
