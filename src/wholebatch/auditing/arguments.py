"""The arguments of an audit that are known without torch, and checks that they make sense."""

from __future__ import annotations

from collections.abc import Callable

from .._base.settings import shown
from .._base.user_error import UserError

_MOST_RANKS = 64
_MOST_SECONDS = 1e9
_MOST_SEED = 2**32 - 2001  # a few are added to it


def check_arguments(
    ranks: object, tolerance: object, timeout_s: object, seed: object, *, spelled: Callable[[str], str] = str
) -> None:
    """Raise UserError for arguments of :func:`wholebatch.audit` that make no sense, with their names as `spelled`."""
    sizes = list(ranks) if isinstance(ranks, list | tuple | range) else []
    if not sizes or any(type(size) is not int or not 1 <= size <= _MOST_RANKS for size in sizes):
        example = "1 2 3" if spelled("ranks") != "ranks" else "(1, 2, 3)"
        raise UserError(
            f"{spelled('ranks')} must be numbers of ranks from 1 to {_MOST_RANKS}, as in {example}; got {shown(ranks)}"
        )
    if tolerance is not None and not (isinstance(tolerance, float) and 0 < tolerance < 1):
        raise UserError(
            f"{spelled('tolerance')} must be a relative error between 0 and 1, as in 1e-5; got {shown(tolerance)}"
        )
    if not isinstance(timeout_s, int | float) or isinstance(timeout_s, bool) or not 0 < timeout_s < _MOST_SECONDS:
        raise UserError(
            f"{spelled('timeout_s')} must be a positive number of seconds, below {_MOST_SECONDS:g}; got "
            f"{shown(timeout_s)}"
        )
    if type(seed) is not int or not 0 <= seed <= _MOST_SEED:
        raise UserError(f"{spelled('seed')} must be an integer from 0 to {_MOST_SEED}; got {shown(seed)}")


def split_name(name: str) -> tuple[str, str]:
    """Return module and function of a problem's name.

    >>> split_name("my_project.audits:clip")
    ('my_project.audits', 'clip')

    Raises:
        UserError: if the name has another form.
    """
    module, colon, function = name.partition(":")
    if not colon or not module or not function or module.startswith("."):
        raise UserError(
            "name the problem as FILE.py:FUNCTION or as MODULE:FUNCTION, as in my_project.audits:clip, where MODULE is "
            f"as in an import; got {name!r}"
        )
    return module, function
