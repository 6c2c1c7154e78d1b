"""Walks through a module, in torch's order, without a call of Python for each module inside: steps make many."""

from __future__ import annotations

from torch import Tensor, nn


def modules_in(module: nn.Module) -> list[nn.Module]:
    """Return `module.modules()`: the module and all modules inside, each once."""
    modules: dict[int, nn.Module] = {}
    todo = [module]
    while todo:
        current = todo.pop()
        if id(current) not in modules:
            modules[id(current)] = current
            for inner in reversed(current._modules.values()):
                if inner is not None:
                    todo.append(inner)
    return [*modules.values()]


def parameters_in(*modules: nn.Module) -> list[Tensor]:
    """Return the parameters of these modules and of all modules inside, each once."""
    parameters: dict[int, Tensor] = {}
    for module in modules:
        for submodule in modules_in(module):
            for p in submodule._parameters.values():
                if p is not None:
                    parameters[id(p)] = p
    return [*parameters.values()]
