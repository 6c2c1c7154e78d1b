"""The command: `python -m wholebatch.integrations.ms_swift` prints the path for ms-swift's --external_plugins."""

import sys

from .switch import plugin_path

PROGRAM = "python -m wholebatch.integrations.ms_swift"
USAGE = f"""\
usage: {PROGRAM}

Prints the path of a plugin for ms-swift:

    swift sft --task_type embedding --loss_type infonce --external_plugins "$({PROGRAM})" ...
"""

if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(USAGE, end="")
        sys.exit(0)
    if sys.argv[1:]:
        print(
            f"{PROGRAM}: error: no arguments are accepted, got {' '.join(sys.argv[1:])!r}; pass them to swift sft",
            file=sys.stderr,
        )
        sys.exit(2)
    print(plugin_path())
