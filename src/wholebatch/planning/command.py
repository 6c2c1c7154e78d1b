"""The command `wholebatch plan` after its options are parsed: print a plan, and check it on this machine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .._base.user_error import UserError
from .._cli.display import print_table, print_text
from .._launch.processes import RankError
from .check import Measured, check, check_gpus, rates_here
from .options import plan_sizes, shapes_of
from .rates import Rates
from .report import LEFT, Plan, headline, remarks, table
from .shapes import Shapes
from .sizes import Sizes
from .units import amount, duration

_CHECK_S = 15.0  # of each setting
_HEADER = (
    "batch size", "exchange", "memory", "bytes predicted", "bytes measured", "bytes error", "time predicted",
    "time measured", "time error", "remark",
)  # fmt: skip


def run(sizes: Sizes, rates: Rates | None, *, measure: bool, save: Path | None, as_json: bool) -> int:
    """Print the plan of checked sizes, with `measure` after a calibration here; return 1 if nothing fits.

    Raises:
        UserError: if this machine cannot run the plan.
    """
    measured: list[Measured] = []
    if measure:
        check_gpus("--measure", sizes.device, sizes.ranks)
        shapes = shapes_of(sizes)
        rates = _measured_rates(shapes, save)
    plan = plan_sizes(sizes, rates)
    if measure:
        settings = {(option.exchange or "gather", option.memory): None for option in plan.options if option.fits}
        try:
            measured = [check(shapes, *setting, plan.rates, within_s=_CHECK_S) for setting in settings]  # type: ignore[arg-type]
        except RankError as error:
            raise UserError(f"a check on this machine failed: {error}") from error
    if as_json:
        check_rows = [{**asdict(x), "shapes": {**asdict(x.shapes), "dtype": plan.dtype}} for x in measured]
        print(json.dumps({**plan.to_dict(), **({"measured": check_rows} if measured else {})}, indent=1))
    else:
        print_plan(plan)
        if measured:
            print_measured(measured)
        elif measure:
            print("no option fits, so none was run")
    return 0 if plan.chosen is not None else 1


def _measured_rates(shapes: Shapes, save: Path | None) -> Rates:
    try:
        rates = rates_here((shapes.loss,), shapes.ranks, dtype=shapes.dtype, device=shapes.device)
    except RankError as error:
        raise UserError(f"the calibration failed: {error}") from error
    if save is not None:
        try:
            save.write_text(rates.to_json())
        except OSError as error:
            raise UserError(f"--save cannot write {save}: {error}") from error
    return rates


def print_plan(plan: Plan) -> None:
    """Print the table, and the calls to paste."""
    header, *rows = table(plan)
    styles = ["bold green" if o is plan.chosen else "" if o.fits else "dim" for o in plan.options]
    print_table(headline(plan), header, rows, left=LEFT, styles=styles)
    for line in remarks(plan):
        print_text(line)


def print_measured(measured: Sequence[Measured]) -> None:
    """Print predictions, measurements and errors, and mark the fastest option."""
    fastest = min(measured, key=lambda m: m.seconds / m.shapes.batch_size**2)  # a batch may have been halved
    rows = []
    for m in measured:
        peak = ["-", "-"] if m.bytes is None else [amount(m.bytes), _error(m.predicted_bytes, m.bytes)]
        rows.append(
            [
                str(m.shapes.batch_size),
                m.exchange if m.shapes.ranks > 1 else "-",
                str(m.memory),
                amount(m.predicted_bytes),
                *peak,
                duration(m.predicted_seconds),
                duration(m.seconds),
                _error(m.predicted_seconds, m.seconds),
                "fastest" if m is fastest and len(measured) > 1 else "",
            ]
        )
    title = "the loss on this machine; its memory without features and their gradients"
    print_table(title, _HEADER, rows, left=("exchange", "memory", "remark"))


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}"
