"""The command: `python -m wholebatch.integrations.grad_cache`, also under torchrun, with a program."""

import sys

from ..._user_error import UserError
from .._run_target import target_of
from .install import install

PROGRAM = "python -m wholebatch.integrations.grad_cache"
USAGE = f"""\
usage: {PROGRAM} -m MODULE [ARGUMENTS]
       {PROGRAM} SCRIPT.py [ARGUMENTS]

Runs a program whose imports of grad_cache give wholebatch's gradient caching and losses.
"""

if __name__ == "__main__":
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(USAGE, end="")
        sys.exit(0)
    try:
        install()
        run = target_of(sys.argv[1:])
    except UserError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
    run()
