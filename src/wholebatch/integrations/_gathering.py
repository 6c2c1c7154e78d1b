"""The choice, in frameworks that compare the rows of one process by default, of the processes that share a batch."""

from __future__ import annotations

from ..comm import Group


def checked_gathering(name: str, gathers: object, group: Group) -> bool:
    """Return whether processes share the batch.

    Args:
        name: the framework's name of the argument.
        gathers: its value.
        group: the processes that would share the batch.

    Raises:
        ValueError: if it is no boolean, or is False beside a group.
    """
    if not isinstance(gathers, bool):
        raise ValueError(f"{name} must be True or False, got {gathers!r}")
    if not gathers and group is not None:
        raise ValueError(
            f"{name}=False compares the rows of one process, so it does not go with group=; leave one of them out"
        )
    return gathers
