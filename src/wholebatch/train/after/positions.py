"""RUN, DATA and other arguments without an option, written as one: `search --run runs/a "red bird"`.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..._user_error import UserError

_POSITIONS = {
    "embed": ("run", "data"),
    "evaluate": ("run", "data"),
    "export": ("run", "folder"),
    "search": ("run", "query"),
}
_INSTEAD = {("search", "data"): "--in"}
"""Options by another name."""


def check_positions(argv: Sequence[str], *, prog: str) -> None:
    """Refuse an option that is a position, with the command as it should be written.

    Args:
        argv: the arguments of the command.
        prog: the command, such as "wholebatch search".

    Raises:
        UserError: such an option.
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
