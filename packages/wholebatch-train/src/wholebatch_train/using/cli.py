"""`wholebatch embed`, `search`, `evaluate` and `export`: options are checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import tyro

from wholebatch.app import UserError, launcher_size

from .options import EmbedConfig, EvaluateConfig, ExportConfig, SearchConfig

_OPTIONS: dict[str, Any] = {
    "embed": EmbedConfig, "search": SearchConfig, "evaluate": EvaluateConfig, "export": ExportConfig
}  # fmt: skip


def main(argv: Sequence[str], *, prog: str) -> None:
    """Run the command that `prog` ends with, such as "wholebatch embed"."""
    name = prog.rpartition(" ")[2]
    options = tyro.cli(_OPTIONS[name], args=list(argv), prog=prog)
    options.check()
    if (launcher_size() or 1) > 1:
        raise UserError(f"{prog} is one process: start it without torchrun or another launcher")
    getattr(import_module(f".{name}", __package__), name)(options)
