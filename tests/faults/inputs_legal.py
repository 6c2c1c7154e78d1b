"""Which of the pool's values an argument may take, each looked at once; and what functions raise, as documented."""

from __future__ import annotations

from typing import Any

from inputs_calls import TheirError

DOCUMENTED: dict[str, Any] = {
    "GradCache.__call__": TheirError,
    "GradCache.cache_step": TheirError,
}


def is_legal(entry: Any, name: str, kind: str) -> bool:
    """Whether the value is what the argument is documented to take."""
    parameter = entry.parameters[name]
    if kind == "none" and parameter.default is None:
        return True
    return kind in ("true", "false") and isinstance(parameter.default, bool)
