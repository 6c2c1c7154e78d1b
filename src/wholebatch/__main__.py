"""The command line: `wholebatch COMMAND ...`, also as `python -m wholebatch COMMAND ...` under a launcher."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

_COMMANDS = {"audit": "wholebatch.auditing.cli", "bench": "wholebatch.bench.cli",
             "plan": "wholebatch.planning.cli", "train": "wholebatch.train.cli"}  # fmt: skip
_SUMMARIES = {
    "audit": "compare the gradient that ranks end with with one process's, and say why it differs",
    "bench": "time what the library does on this machine",
    "plan": "what fits: memory, time and bytes sent of each way to compute a loss, and the largest batch",
    "train": "train a dual encoder, or an encoder and a classifier, with the exact loss of the global batch",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it succeeded, 1 if a gradient is wrong, nothing fits or a rank died, 2 for a mistake.

    The mistake is one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from wholebatch import __version__

        print(f"wholebatch {__version__}")
        return 0
    if arguments[0] not in _COMMANDS:
        return _mistake("wholebatch", f"there is no command {arguments[0]!r}; choose one of: {', '.join(_COMMANDS)}")
    prog = f"wholebatch {arguments[0]}"
    try:
        command = importlib.import_module(_COMMANDS[arguments[0]])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "wholebatch":
            raise
        return _mistake(prog, f"needs the package {error.name!r}: pip install 'wholebatch[train]'")
    from wholebatch._user_error import UserError

    try:
        code = command.main(arguments[1:], prog=prog) or 0
    except UserError as error:
        return _mistake(prog, str(error), error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    if "WORLD_SIZE" in os.environ:
        # Under torchrun. gloo's threads outlive destroy_process_group, and now and then abort a process that tears the
        # interpreter down ("terminate called without an active exception": any DDP program, torch 2.13). All is
        # written; leave at once.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return int(code)


def _usage() -> str:
    commands = "\n".join(f"  {name:8} {summary}" for name, summary in _SUMMARIES.items())
    usage = f"usage: wholebatch COMMAND [OPTIONS]\n\ncommands:\n{commands}"
    return f"{usage}\n\n'wholebatch COMMAND --help' explains the options."


def _mistake(prog: str, message: str, exit_code: int = 2) -> int:
    print(f"{prog}: error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
