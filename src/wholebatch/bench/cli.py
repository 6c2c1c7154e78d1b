"""The command `wholebatch bench NAME`: options are checked before torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from wholebatch._base.spelling import did_you_mean
from wholebatch._base.user_error import UserError
from wholebatch._cli.parse import parse

from .config import GatherConfig, LossConfig

_BENCHMARKS: dict[str, type[GatherConfig | LossConfig]] = {"gather": GatherConfig, "loss": LossConfig}


def main(argv: Sequence[str], *, prog: str) -> None:
    """Run a benchmark.

    Raises:
        UserError: for a mistake in the options.
        SystemExit: 0 after --help, 2 for options that cannot be parsed.
    """
    if not argv or argv[0] in ("-h", "--help"):
        usage = [f"usage: {prog} {{{','.join(_BENCHMARKS)}}} [OPTIONS]", ""]
        usage += [f"  {name:8}{(config.__doc__ or '').splitlines()[0]}" for name, config in _BENCHMARKS.items()]
        print("\n".join(usage), file=sys.stdout if argv else sys.stderr)
        raise SystemExit(0 if argv else 2)
    if argv[0] not in _BENCHMARKS:
        meant = did_you_mean(argv[0], _BENCHMARKS)
        raise UserError(f"there is no benchmark {argv[0]!r}; choose one of: {', '.join(_BENCHMARKS)}{meant}")
    config = parse(_BENCHMARKS[argv[0]], argv[1:], f"{prog} {argv[0]}")
    config.check()
    if isinstance(config, GatherConfig):
        from .run_gather import run_gather

        run_gather(config)
    else:
        from .run_loss import run_loss

        run_loss(config)
