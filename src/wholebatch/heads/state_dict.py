"""The classes of a head's state_dict, which is one rank's part: they are recorded, and compared before it is loaded."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def record_classes(head: Any, _state: Any, _prefix: str, metadata: dict[str, Any]) -> None:
    """Record the classes in a state_dict's metadata, beside its tensors; torch.save keeps them."""
    metadata["classes"] = [head.local_classes.start, head.local_classes.stop, head.num_classes]


def check_classes(head: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_others: Any) -> None:
    """Raise ValueError for a state_dict of other classes, before anything of it is loaded.

    A state_dict of another rank with the same number of classes is loaded; the next use of the head then raises, on all
    ranks.

    Raises:
        ValueError: if its number of classes is not that of this rank, or is from a head with another total.
    """
    weight, local = state.get(prefix + "weight"), head.local_classes
    if not isinstance(weight, Tensor) or not weight.dim():
        return
    first, stop, count = metadata.get("classes", (None, None, head.num_classes))
    if len(weight) == local.stop - local.start and count == head.num_classes:
        return
    content = f"{len(weight)} classes" if first is None else f"classes {first} to {stop} of {count}"
    raise ValueError(
        f"a state_dict holds one rank's part of a head; the one for {prefix + 'weight'!r} has {content}, and this rank "
        f"has classes {local.start} to {local.stop} of {head.num_classes}. wholebatch.heads.save_head and load_head "
        "write and read all parts, on any number of ranks"
    )
