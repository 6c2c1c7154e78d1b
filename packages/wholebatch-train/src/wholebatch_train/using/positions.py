"""RUN, DATA and other arguments without an option, written as one: `search --run runs/a "red bird"`; or no quotes.

This module imports no torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from wholebatch.app import UserError

_POSITIONS = {
    "embed": ("run", "data"),
    "evaluate": ("run", "data"),
    "export": ("run", "folder"),
    "search": ("run", "query"),
}
_INSTEAD = {("search", "data"): "--in"}
"""Options by another name."""
_FLAGS = ("--skip-bad", "--no-skip-bad")
"""Options of `search` without a value."""


def check_positions(argv: Sequence[str], *, prog: str) -> None:
    """Refuse an option that is a position, and a QUERY without quotes, with the command as it should be written.

    Args:
        argv: the arguments of the command.
        prog: the command, such as "wholebatch search".
    """
    command = prog.rpartition(" ")[2]
    positions = _POSITIONS[command]
    usage = " ".join([prog, *(name.upper() for name in positions)])
    for argument in argv:
        if argument == "--":
            return
        if not argument.startswith("--"):
            continue
        name = argument.partition("=")[0].removeprefix("--")
        if name in positions:
            raise UserError(f"--{name} is no option of this command, {name.upper()} is given by its position: {usage}")
        if (command, name) in _INSTEAD:
            instead = _INSTEAD[command, name]
            raise UserError(f"--{name} is no option of this command, it is {instead}: {usage} {instead} {name.upper()}")
    if command == "search" and not {"--help", "-h"} & {*argv}:
        _check_one_query(argv, prog)


def _check_one_query(argv: Sequence[str], prog: str) -> None:
    """Raise UserError if there are more arguments without an option than RUN and QUERY."""
    positionals, is_value = [], False
    for argument in argv:
        is_option = argument.startswith("-") and not is_value
        if not is_option and not is_value:
            positionals.append(argument)
        is_value = is_option and "=" not in argument and argument not in _FLAGS
    if len(positionals) > len(_POSITIONS["search"]):
        run, *words = positionals
        text = " ".join(words)
        quoted = shlex.quote(text) if {*text} & {*'"$`\\!'} else f'"{text}"'
        raise UserError(
            f"QUERY is one argument, got {len(words)}; put a text of several words in quotes: "
            f"{prog} {shlex.quote(run)} {quoted}; --queries FILE takes several queries"
        )
