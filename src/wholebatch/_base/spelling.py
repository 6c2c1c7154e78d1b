"""The known name that is most similar to a misspelled one, for messages. This module imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean ...?" with the known name that is most similar, or "" if none is; case does not count.

    >>> did_you_mean("CLIPloss", ["CLIPLoss", "SigLIPLoss"]), did_you_mean("x", ["CLIPLoss"])
    ('; did you mean CLIPLoss?', '')
    """
    spellings = {x.lower(): x for x in known}
    similar = get_close_matches(name.lower(), spellings, n=1, cutoff=cutoff)
    return f"; did you mean {spellings[similar[0]]}?" if similar else ""
