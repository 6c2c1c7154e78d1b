"""Walk trees of mappings, lists and tuples, such as a model's inputs, a batch, or a rank's result.

A mapped tree has the form and the types of the original: a NamedTuple or an OrderedDict stays one. Everything else is a
leaf, a dataclass too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

IsLeaf = Callable[[Any], bool]
LEFT_OUT = object()  # what a function returns for a leaf that its mapping shall not have


def only_others(_tree: Any) -> bool:
    """Treat no mapping, list or tuple as a leaf."""
    return False


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """Yield all tensors of a tree, from left to right."""
    return (leaf for _, leaf in leaves(tree) if isinstance(leaf, Tensor))


def leaves(tree: Any, path: str = "", *, is_leaf: IsLeaf = only_others) -> Iterator[tuple[str, Any]]:
    """Yield each leaf with its path, from left to right.

    >>> list(leaves({"x": [1, 2], "scale": 3.0}))
    [('x[0]', 1), ('x[1]', 2), ('scale', 3.0)]
    """
    if isinstance(tree, Mapping) and not is_leaf(tree):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key), is_leaf=is_leaf)
    elif isinstance(tree, list | tuple) and not is_leaf(tree):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{path}[{index}]", is_leaf=is_leaf)
    else:
        yield path, tree


def map_leaves(function: Callable[[Any], Any], tree: Any, *, is_leaf: IsLeaf = only_others) -> Any:
    """Return a tree of the same form whose leaves are `function(leaf)`, called from left to right.

    A mapping has no item whose leaf is LEFT_OUT.

    >>> map_leaves(lambda x: 10 * x, {"x": (1, 2), "scale": 3.0})
    {'x': (10, 20), 'scale': 30.0}
    """
    if isinstance(tree, Mapping) and not is_leaf(tree):
        items = {key: map_leaves(function, value, is_leaf=is_leaf) for key, value in tree.items()}
        return _mapping_like(tree, {key: value for key, value in items.items() if value is not LEFT_OUT})
    if isinstance(tree, list | tuple) and not is_leaf(tree):
        return sequence_like(tree, [map_leaves(function, value, is_leaf=is_leaf) for value in tree])
    return function(tree)


def map_leaves_by_path(function: Callable[[str, Any], Any], tree: Any, *, is_leaf: IsLeaf = only_others) -> Any:
    """Return a tree of the same form whose leaves are `function(path, leaf)`, as in `map_leaves`."""
    paths = (path for path, _ in leaves(tree, is_leaf=is_leaf))
    return map_leaves(lambda leaf: function(next(paths), leaf), tree, is_leaf=is_leaf)


def _mapping_like(original: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return the items in a mapping of the original's type."""
    if type(original) is dict:
        return items
    if not isinstance(original, dict):
        return type(original)(items)  # type: ignore[call-arg]
    copied = copy(original)  # a subclass may take other arguments, as defaultdict does
    for key, value in items.items():
        copied[key] = value
    for key in original.keys() - items.keys():
        del copied[key]
    return copied


def sequence_like(original: Sequence[Any], items: Sequence[Any]) -> Any:
    """Return the items in a sequence of the original's type; a NamedTuple takes them one by one."""
    return type(original)(*items) if hasattr(original, "_fields") else type(original)(items)  # type: ignore[call-arg]
