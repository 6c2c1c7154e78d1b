"""Suppress and keep the standard output of a user's code, so that it does not end up in a table or in JSON."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def suppress_output() -> Iterator[Callable[[], str]]:
    """Suppress standard output, of C libraries too; after the block, the yielded function returns the text."""
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        stdout = os.dup(1)
        os.dup2(file.fileno(), 1)
        texts: list[str] = []
        try:
            with contextlib.redirect_stdout(file):
                yield lambda: "".join(texts)
        finally:
            file.flush()
            os.dup2(stdout, 1)
            os.close(stdout)
            file.seek(0)
            texts.append(file.read())
