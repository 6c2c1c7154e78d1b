"""The command: `python -m wholebatch.integrations.tevatron`, also under torchrun, with a program."""

import sys

from ..._user_error import UserError
from .._framework import FrameworkError
from .._run_target import target_of
from .install import install

PROGRAM = "python -m wholebatch.integrations.tevatron"
USAGE = f"""\
usage: {PROGRAM} -m tevatron.retriever.driver.train OPTIONS OF TEVATRON
       {PROGRAM} SCRIPT.py [ARGUMENTS]

Runs one of Tevatron's drivers, or a program that uses its trainers, with the loss of the whole batch.
"""

if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE, end="")
        sys.exit(0)
    try:
        install()
        run = target_of(sys.argv[1:])
    except (FrameworkError, UserError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    run()
