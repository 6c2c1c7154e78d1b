"""The commands `python -m wholebatch.integrations.NAME`, also under torchrun, and the programs that they run."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from .._base.user_error import UserError
from ._framework import FrameworkError


def run_command(name: str) -> NoReturn:
    """Run an adapter's `start`, imported by the name that programs import, and exit with the number that it returns.

    `start` gets the arguments. It may return a function, the program: its errors keep their tracebacks. A mistake of
    the user before is one line. For --help the adapter's `USAGE` is printed, if it has one.
    """
    program = f"python -m wholebatch.integrations.{name}"
    adapter = import_module(f"wholebatch.integrations.{name}")
    if sys.argv[1:2] in (["-h"], ["--help"]) and hasattr(adapter, "USAGE"):
        print(adapter.USAGE, end="")
        sys.exit(0)
    try:
        run = adapter.start(sys.argv[1:])
    except (FrameworkError, UserError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run() if callable(run) else run)


def program_of(argv: Sequence[str]) -> Callable[[], None]:
    """Return a function that runs `-m MODULE` or a script as `__main__` in this process; raise UserError for another.

    `argv` has the program's arguments as well; it runs as Python itself would run it.
    """
    if argv[:1] == ["-m"]:
        if len(argv) == 1:
            raise UserError("-m must be followed by the name of a module, got nothing")
        _check_module(argv[1])
    elif not argv or argv[0].startswith("-"):
        got = argv[0] if argv else "nothing"
        raise UserError(f"expected -m MODULE or the path of a script, got {got}; options of the program come after it")
    elif not Path(argv[0]).exists():
        raise UserError(f"there is no script {argv[0]} in {os.getcwd()}; for a module write -m {argv[0]}")

    def run() -> None:
        if argv[0] == "-m":
            sys.argv = [*argv[1:]]  # runpy puts the module's path first
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
            return
        sys.argv = [*argv]
        if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
            sys.path[0] = str(Path(argv[0]).resolve().parent)
        runpy.run_path(argv[0], run_name="__main__")

    return run


def _check_module(name: str) -> None:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package that the module's parents import
        spec = None
    if spec is None:
        raise UserError(f"there is no module {name}; install it, or add its folder to PYTHONPATH")
