"""Watch a call of a user's functions: what they read from elsewhere, draw at random, or write into.

a captured tensor      it would get no gradient, and would meet each tile's rows as if they were the first
random draws           the backward pass would draw others
writing                into s, data or parameters
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .fingerprint import captured

_SIGNATURES = (
    "a score is called as f(s, x, y, p), a mask as where(x, y), where(x, y, s) or where(x, y, s, p), a row loss as "
    "F(r, x, p), a column loss as F(r, y, p)"
)
_FIXES = {  # by a part of Python's or torch's message
    "Boolean value of Tensor": "use (a) & (b), | and ~ instead of `and`, `or`, `not` and chained comparisons, and "
    "torch.where or x.clamp(min=0) instead of `if` and max(0, x)",
    "only one element tensors": "use functions of torch, s.exp() instead of math.exp(s)",
    "'float' object has no attribute": "a number in parameters stays one: pass torch.tensor(...) for its methods",
    "'Tensor' object has no attribute": _SIGNATURES,
}


def watched(
    name: str, functions: Mapping[str, Callable[..., Any]], known: Sequence[Tensor], call: Callable[[], Any], *, on: str
) -> Any:
    """Return what a call of the user's functions returns; raise if it reads, draws or writes what it must not."""
    versions = [_version(x) for x in known]
    with torch.no_grad(), _Random(name), _Captured(name, functions, known):
        try:
            result = call()
        except (ValueError, AttributeError) as error:
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"{name} failed: {error}{_fix(error)}") from error
        except Exception as error:
            raise ValueError(f"{name} failed on {on}: {type(error).__name__}: {error}{_fix(error)}") from error
    if versions != [_version(x) for x in known]:
        raise ValueError(f"{name} must not write into its arguments: use s * 2 instead of s.mul_(2), or s.clone()")
    return result


def _fix(error: Exception) -> str:
    """Return what to change, where the message alone does not tell."""
    known = next((fix for part, fix in _FIXES.items() if part in str(error)), "")
    fix = known or (_SIGNATURES if isinstance(error, TypeError) else "")
    return f"; {fix}" if fix else ""


def _version(x: Tensor) -> int:
    """Return the number of writes into a tensor; those into tensors of torch.inference_mode are not counted."""
    return 0 if x.is_inference() else x._version


class _Captured(TorchFunctionMode):
    """Raise if an operation gets a tensor that the function has neither received nor made."""

    def __init__(self, label: str, functions: Mapping[str, Callable[..., Any]], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.label, self.functions = label, functions
        self.known = {id(x): x for x in tensors}  # they live as long as their ids are compared

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in itertools.chain(tree_leaves(args), tree_leaves(kwargs)):
            if isinstance(x, Tensor) and id(x) not in self.known:
                names = (captured(function, x) for function in self.functions.values())
                name = next((text for text in names if text), "a tensor without a name")
                tensor = f"{name} of shape {tuple(x.shape)}{' with a gradient' if x.requires_grad else ''}"
                raise ValueError(
                    f"{self.label} must receive its tensors as x, y or p, got {tensor} from elsewhere: pass numbers of "
                    "rows in x_data or y_data, and shared ones in parameters"
                )
        output = func(*args, **kwargs)
        for x in tree_leaves(output):
            if isinstance(x, Tensor):
                self.known[id(x)] = x
        return output


class _Random(TorchDispatchMode):
    """Raise if an operation draws random numbers."""

    _should_skip_dynamo = classmethod(lambda cls: False)  # else torch imports Dynamo at the first operation

    def __init__(self, label: str) -> None:
        super().__init__()
        self.label = label

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"{self.label} must not draw random numbers ({resolve_name(func) or func}): the backward pass computes "
                "it again; draw them before the call, and pass them in x_data or parameters"
            )
        return func(*args, **(kwargs or {}))
