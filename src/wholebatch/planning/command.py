"""The command `wholebatch plan` after its options are parsed: print a plan, and check it on this machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from .._base.user_error import UserError
from .._launch.processes import RankError
from .check import Measured, check, rates_here
from .display import print_measured, print_plan
from .options import plan, shapes_of
from .rates import Rates
from .sizes import Sizes

_CHECK_S = 15.0  # of each setting


def run(arguments: Mapping[str, Any], rates: Rates | None, *, measure: bool, save: Path | None, as_json: bool) -> int:
    """Print a plan; return 1 if nothing fits.

    Args:
        arguments: of :func:`wholebatch.plan`, checked.
        rates: read from a file; None: given ones, or measured ones.
        measure: whether to calibrate on this machine, and to run each option that fits.
        save: the file for measured rates.
        as_json: print JSON instead of tables.

    Raises:
        UserError: if this machine cannot run the plan.
    """
    measured: list[Measured] = []
    if measure:
        sizes = Sizes.from_arguments(**arguments)
        gpus = torch.cuda.device_count()
        if sizes.device == "cuda" and gpus < sizes.ranks:
            raise UserError(f"--measure needs a GPU for each of {sizes.ranks} ranks, and there are {gpus}")
        shapes = shapes_of(sizes, sizes.loss if sizes.declared else None)
        try:
            rates = rates_here((shapes.loss,), shapes.ranks, dtype=shapes.dtype, device=shapes.device)
        except RankError as error:
            raise UserError(f"the calibration failed: {error}") from error
        if save is not None:
            try:
                save.write_text(rates.to_json())
            except OSError as error:
                raise UserError(f"--save cannot write {save}: {error}") from error
    result = plan(**arguments, rates=rates)
    if measure:
        settings = {(option.exchange or "gather", option.memory): None for option in result.options if option.fits}
        try:
            measured = [check(shapes, *setting, result.rates, within_s=_CHECK_S) for setting in settings]  # type: ignore[arg-type]
        except RankError as error:
            raise UserError(f"a check on this machine failed: {error}") from error
    if as_json:
        of_checks = [{**asdict(x), "shapes": {**asdict(x.shapes), "dtype": result.dtype}} for x in measured]
        print(json.dumps({**result.to_dict(), **({"measured": of_checks} if measured else {})}, indent=1))
    else:
        print_plan(result)
        if measured:
            print_measured(measured)
        elif measure:
            print("no option fits, so none was run")
    return 0 if result.chosen is not None else 1
