"""The command `wholebatch doctor`: options are checked before torch is imported. The report can be pasted elsewhere."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import NoReturn

from .._base.spelling import did_you_mean
from .._base.user_error import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str], *, prog: str = "wholebatch doctor") -> int:
    """Print the report; return 0, or 1 if kernels failed a check.

    Raises:
        UserError: for a mistake in the options.
        SystemExit: 0 after --help.
    """
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        description="Print versions and the device, check the Triton kernels of each loss against float64, and time "
        "them against plain PyTorch. Exit code 0: all passed, or kernels cannot run here; 1: a check failed.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rows", type=int, default=None, help="rows of the random batch (4096; 256 without a GPU)")
    parser.add_argument("--embedding-size", type=int, default=None, help="numbers of a row (512; 64 without a GPU)")
    options, unknown = parser.parse_known_args(list(argv))
    if unknown:
        meant = did_you_mean(unknown[0], ("--json", "--rows", "--embedding-size"))
        raise UserError(f"there is no option {unknown[0]}; see {prog} --help{meant}")
    sizes = {"--rows": options.rows, "--embedding-size": options.embedding_size}
    for (name, value), least in zip(sizes.items(), (2, 4), strict=True):
        if value is not None and value < least:
            raise UserError(f"{name} must be at least {least}, got {value}")
    from .report import examine_here

    report = examine_here(options.rows, options.embedding_size)
    print(json.dumps(report.as_json(), indent=2) if options.json else report)
    return int(report.failed)
