"""The command line: `wholebatch COMMAND ...`, also as `python -m wholebatch COMMAND ...` under a launcher.

This module imports no torch: the module of a command imports it when needed.
"""

from __future__ import annotations

import errno
import importlib
import importlib.metadata
import os
import select
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from wholebatch._base.spelling import did_you_mean
from wholebatch._base.user_error import UserError, needs, printable


class _Command(NamedTuple):
    summary: str
    module: str = ""
    """Its `main(argv, *, prog)` parses the options and runs the command; "": the application's entry point does."""
    packages: tuple[str, ...] = ()


_UNREACHABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # paths that a user names
_APPLICATION = "wholebatch-train"
_COMMANDS = {
    "audit": _Command(
        "check that ranks give the gradient of one process, or find the cause",
        "wholebatch.auditing.cli", ("tyro", "rich"),
    ),
    "bench": _Command(
        "time the library's losses and collectives on this machine",
        "wholebatch.bench.cli", ("tyro", "rich", "matplotlib"),
    ),
    "doctor": _Command(
        "print versions and the device, and check and time the kernels on it", "wholebatch.doctor.cli",
    ),
    "embed": _Command(
        "write the features of a table or of a folder of pictures, by a trained model",
    ),
    "evaluate": _Command(
        "measure a trained model's retrieval or classification on a table",
    ),
    "export": _Command(
        "write a trained model as a folder of sentence-transformers or open_clip",
    ),
    "plan": _Command(
        "estimate a loss's memory and time, and the largest batch that fits",
        "wholebatch.planning.cli", ("tyro", "rich"),
    ),
    "search": _Command(
        "find the pictures or texts most similar to a text or a picture",
    ),
    "train": _Command(
        "train a dual encoder or a classifier with the exact global loss",
    ),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a mistake of the user's is one line on stderr.

    Returns:
        0 if it succeeded; 1 if a gradient is wrong, nothing fits or a rank died; 2 for a mistake; 130 after Ctrl-C; 141
        if a pipe that reads the output is closed.
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _output_is_closed():
            raise  # another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter fails when it flushes
        return 141


def _output_is_closed() -> bool:
    """Return whether the standard output is a pipe that nobody reads."""
    if not hasattr(select, "poll"):
        return True
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(), file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from wholebatch import __version__

        print(f"wholebatch {__version__}")
        return 0
    if arguments[0] not in _COMMANDS:
        meant = did_you_mean(arguments[0], _COMMANDS)
        return _mistake(
            "wholebatch", f"there is no command {arguments[0]!r}; choose one of: {', '.join(_COMMANDS)}{meant}"
        )
    prog, command = f"wholebatch {arguments[0]}", _COMMANDS[arguments[0]]
    missing = [name for name in ("torch", *command.packages) if find_spec(name) is None]
    if missing:
        return _mistake(prog, needs("this command", *missing))
    try:
        code = int(_main_of(arguments[0], command.module)(arguments[1:], prog=prog) or 0)
    except UserError as error:
        return _mistake(prog, str(error), error.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("wholebatch"):
            raise
        return _mistake(prog, needs("this command", error.name))
    except OSError as error:
        if error.errno not in _UNREACHABLE or error.filename is None:
            raise
        return _mistake(prog, f"{str(error.filename)!r} cannot be reached: {error.strerror}")
    if "WORLD_SIZE" in os.environ:
        # Under torchrun. gloo's threads outlive destroy_process_group, and occasionally abort a process that tears the
        # interpreter down ("terminate called without an active exception": any DDP program, torch 2.13). All output is
        # written; leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _main_of(name: str, module: str) -> Callable[..., int | None]:
    if module:
        return importlib.import_module(module).main
    for entry in importlib.metadata.entry_points(group="wholebatch.commands", name=name):
        return entry.load()
    raise UserError(f"this command belongs to {_APPLICATION}: pip install ./packages/{_APPLICATION}, in a checkout")


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {command.summary}" for name, command in _COMMANDS.items())
    usage = f"usage: wholebatch COMMAND [OPTIONS]\n\ncommands:\n{commands}"
    return f"{usage}\n\n'wholebatch COMMAND --help' explains the options."


def _mistake(prog: str, message: str, exit_code: int = 2) -> int:
    print(printable(f"{prog}: error: {' '.join(message.split())}"), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
