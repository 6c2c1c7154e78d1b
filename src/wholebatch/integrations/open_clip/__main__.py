"""The command: `python -m wholebatch.integrations.open_clip`, also under torchrun, with open_clip's options."""

import sys

from ..._user_error import UserError
from .._framework import FrameworkError
from .trainer import main

PROGRAM = "python -m wholebatch.integrations.open_clip"
USAGE = f"""\
usage: {PROGRAM} [--wholebatch-chunk-size N] OPTIONS OF OPEN_CLIP

Runs open_clip's trainer with the loss of the whole batch. With --wholebatch-chunk-size N, the trainer encodes N rows at
a time, and holds the activations of these only. The help of open_clip's trainer follows.
"""

if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(USAGE)
    try:
        sys.exit(main(sys.argv[1:]))
    except (FrameworkError, UserError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
