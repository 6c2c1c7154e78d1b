"""The command `wholebatch audit`: options are checked before torch is imported."""

from __future__ import annotations

from collections.abc import Sequence

from .._cli.parse import parse
from .config import AuditConfig


def main(argv: Sequence[str], *, prog: str) -> int:
    """Audit the problem or presets that `argv` names; return 1 if a gradient is wrong.

    Raises:
        UserError: for a mistake in the options or in the problem.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    config = parse(AuditConfig, argv, prog)
    config.check()
    from .command import run

    return run(config)
