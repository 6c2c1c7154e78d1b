"""A plan in words and columns: what `str(plan)` and `wholebatch plan` show."""

from __future__ import annotations

from .plan import Option, Plan

COLUMNS = ("", "exchange", "S", "encoders", "peak", "sent", "TFLOP", "time", "largest", "")
_CACHING = COLUMNS.index("encoders")


def headline(plan: Plan) -> str:
    """Of what it is a plan."""
    ranks = f"{plan.ranks} rank{'s' if plan.ranks > 1 else ''}"
    return (
        f"{plan.loss}, batch {plan.batch}, d = {plan.dim}, {plan.dtype}, {ranks} of {plan.device}, at most "
        f"{amount(plan.limit)} each"
    )


def lines(plan: Plan) -> list[tuple[str, ...]]:
    """The header, then the options; how encoders run only where there is a choice."""
    found = [COLUMNS, *(_row(plan, number, option) for number, option in enumerate(plan.options, 1))]
    if any(option.chunk is not None for option in plan.options):
        return found
    return [line[:_CACHING] + line[_CACHING + 1 :] for line in found]


def remarks(plan: Plan) -> list[str]:
    """What to paste, and with what times were reckoned."""
    found = []
    if plan.chosen is None:
        smallest = min(plan.options, key=lambda option: option.peak)
        largest = max(plan.options, key=lambda option: option.largest_batch)
        found.append(
            f"Nothing fits: the least is {amount(smallest.peak)}. The largest batch that fits is "
            f"{largest.largest_batch}, with {largest.call}"
        )
    else:
        found.append(f"chosen: {plan.chosen.call}")
    fitting = [option for option in plan.options if option.fits]
    if fitting:
        best = max(fitting, key=lambda option: (option.largest_batch, -option.seconds))
        found.append(f"largest batch that fits: {best.largest_batch}, with {best.call}")
    what = "loss and encoders" if plan.encoders else "the loss alone"
    found.append(f"peak, sent and time of a rank and a step, {what} in the time; rates {plan.rates.source}")
    return found


def text(plan: Plan) -> str:
    """All of it, in plain characters."""
    table = lines(plan)
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
    return "\n".join([headline(plan), *shown, *remarks(plan)])


def _row(plan: Plan, number: int, option: Option) -> tuple[str, ...]:
    marks = ["chosen"] if option is plan.chosen else []
    marks += ["auto"] if option.auto else []
    marks += [] if option.fits else ["too large"]
    return (
        str(number),
        option.exchange or "-",
        of_entries(plan.loss, option),
        _encoders(option),
        amount(option.peak),
        amount(option.wire),
        f"{option.flops / 1e12:.3g}",
        duration(option.seconds),
        str(option.largest_batch),
        ", ".join(marks),
    )


def of_entries(loss: str, option: Option) -> str:
    """How often entries of S are computed, or how they are kept."""
    if not option.kept:
        return "once" if loss == "siglip" else "twice"
    part = "kept" if option.kept > 0.995 else f"{option.kept:.0%} kept"
    return f"{part}, {option.kept_size} B"


def _encoders(option: Option) -> str:
    if option.chunk is None:
        return "at once"
    kept = f", keep {option.kept_graphs}" if option.kept_graphs else ""
    return f"chunks of {option.chunk}{kept}"


def amount(number: float) -> str:
    """Bytes, in the unit that reads best.

    >>> amount(0), amount(2_345_678), amount(141e9)
    ('0 B', '2.35 MB', '141 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    """The same of seconds.

    >>> duration(0.0123), duration(75), duration(900)
    ('12.3 ms', '75 s', '15 min')
    """
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
