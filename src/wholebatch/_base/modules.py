"""Walks through a module, in torch's order, without a call of Python for each module inside: steps make many."""

from __future__ import annotations

from torch import Tensor, nn


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return `module.modules()`: the module and all modules inside, each once."""
    found: dict[int, nn.Module] = {}
    todo = [module]
    while todo:
        one = todo.pop()
        if id(one) not in found:
            found[id(one)] = one
            for inner in reversed(one._modules.values()):
                if inner is not None:
                    todo.append(inner)
    return [*found.values()]


def parameters_in(*modules: nn.Module) -> list[Tensor]:
    """Return the parameters of these modules and of all modules inside, each once."""
    found: dict[int, Tensor] = {}
    for module in modules:
        for one in modules_in(module):
            for p in one._parameters.values():
                if p is not None:
                    found[id(p)] = p
    return [*found.values()]
