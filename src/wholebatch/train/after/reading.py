"""Errors of reading a file, as mistakes of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..._base.user_error import UserError

Kinds = tuple[type[Exception], ...]


@contextmanager
def reading(path: Path, what: str, kinds: Kinds, *, named: Kinds = ()) -> Iterator[None]:
    """Turn an error of a file into a UserError.

    Args:
        path: the file.
        what: "a file of features", or the like.
        kinds: errors that a damaged file, or none, causes.
        named: those whose message names the file.
    """
    try:
        yield
    except UserError:
        raise
    except named as error:
        raise UserError(str(error)) from error
    except kinds as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{str(path)!r} cannot be read as {what}: {reason}") from error
