"""The command: `python -m wholebatch.integrations.flag_embedding -m MODULE ...`, also under torchrun."""

import sys

from ..._user_error import UserError
from .._framework import FrameworkError
from .switch import PROGRAM, main

if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (FrameworkError, UserError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        sys.exit(2)
