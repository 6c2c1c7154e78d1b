"""Whether a model takes a mapping as its keywords, or as its one positional argument.

    def forward(self, input_ids, attention_mask)     keywords
    def forward(self, **features)                    keywords
    def forward(self, input, **kwargs)               the mapping itself, unless it has the key "input"

The signature decides; the model is not called to find out. A wrapper such as DistributedDataParallel, whose forward
takes anything, has the signature of the module inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

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
