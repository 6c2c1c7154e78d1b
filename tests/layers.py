"""The layers of the package, and its imports, read from its source, with those for type checkers and in functions."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "wholebatch"

# From the bottom up. A module imports from its own package and from lower layers; siblings do not import each other.
FOUNDATION = "foundation"  # the modules that belong to no other layer: partition, logsumexp, tokens, scale
BASE = ("_base", "_cli", "_launch")
LAYERS = (
    *((name,) for name in BASE),
    (FOUNDATION,),
    ("kernels", "jax"),
    ("sweep", "comm"),
    ("exchange", "sync", "_measure"),
    ("contract",),
    ("nodes",),
    ("pair_loss",),
    ("terms",),
    ("losses", "heads", "gradcache"),
    ("functional", "options", "reference", "recipes"),
    ("integrations",),
    ("auditing",),
    ("testing",),
    ("planning",),
    ("bench", "doctor", "app"),
    ("_torch_names",),
    ("",),
)
# Two modules refer to others by a string, which this check does not see. Importing them runs no code of upper layers.
# `losses/catalog.py` imports each loss by its name: a loss is declared in its file only, and the catalog lists none.
# `__main__` imports the module of a command when it is called: the others' dependencies may be missing.
KNOWN = {name for layer in LAYERS for name in layer}


def layer_of(module: str) -> str:
    """Return the layer's name of a module, which is that of its package."""
    unit = module.split(".")[0]
    return unit if unit in KNOWN else FOUNDATION


def modules(root: Path) -> dict[str, Path]:
    """Return every module of the package by its dotted name, such as `comm.mpi`, packages by that of the folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> dict[str, set[str]]:
    """Return the modules that each module imports, without itself and without the packages above it."""
    known = modules(root)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for target in _targets(name, path, known):
            if target != name and not name.startswith(f"{target}.") and target:
                graph[name].add(target)
    return graph


@cache
def _statements(text: str) -> list[ast.Import | ast.ImportFrom]:
    """Return the imports of a module; tests read copies of the package of which one module differs."""
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]


def _targets(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    package = [part for part in package if part]
    for node in _statements(path.read_text()):
        if isinstance(node, ast.Import):
            bases = [(alias.name.split(".")[1:], []) for alias in node.names if alias.name.split(".")[0] == PACKAGE]
        elif node.level:
            above = package[: len(package) - node.level + 1]
            bases = [(above + (node.module.split(".") if node.module else []), [alias.name for alias in node.names])]
        elif node.module and node.module.split(".")[0] == PACKAGE:
            bases = [(node.module.split(".")[1:], [alias.name for alias in node.names])]
        else:
            continue
        for base, names in bases:
            inside = [".".join([*base, each]) for each in names]
            if not names or any(each not in known for each in inside):
                yield ".".join(base)
            yield from (each for each in inside if each in known)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other (the strongly connected components of more than one)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(graph: dict[str, set[str]], start: str, into: list[str]) -> None:
        stack = [(start, iter(sorted(graph.get(start, ()))))]
        seen.add(start)
        while stack:
            node, rest = stack[-1]
            for after in rest:
                if after not in seen and after in graph:
                    seen.add(after)
                    stack.append((after, iter(sorted(graph[after]))))
                    break
            else:
                stack.pop()
                into.append(node)

    for node in graph:
        if node not in seen:
            visit(graph, node, order)
    backward: dict[str, set[str]] = {node: set() for node in graph}
    for node, after in graph.items():
        for each in after:
            backward.setdefault(each, set()).add(node)
    seen.clear()
    found = []
    for node in reversed(order):
        if node not in seen:
            group: list[str] = []
            visit(backward, node, group)
            if len(group) > 1:
                found.append(sorted(group))
    return found
