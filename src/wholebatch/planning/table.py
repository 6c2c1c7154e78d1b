"""A plan in words and columns: what `str(plan)` and `wholebatch plan` show."""

from __future__ import annotations

from .options import Option, Plan

COLUMNS = ("", "exchange", "similarities", "encoders", "peak", "sent", "FLOP", "time", "largest batch", "")
_NAMES = {2: "bf16", 4: "fp32", 8: "fp64"}
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
    best = max(plan.options, key=lambda option: (option.largest_batch, -option.seconds))
    if plan.chosen is None:
        found.append(f"Nothing fits: the least is {amount(min(option.peak for option in plan.options))}.")
    else:
        found.append(f"chosen: {plan.chosen.call}")
        if plan.chosen.kept_graphs and not plan.encoders:
            found.append("  what encodes least twice counts as fastest while --encoder-flops are not given")
    if best.largest_batch:
        found.append(f"largest batch that fits: {best.largest_batch}, with {best.call_of_largest}")
    else:
        found.append("No batch fits: what a rank holds throughout, and two tiles, take more than there is")
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
        operations(option.flops),
        duration(option.seconds),
        str(option.largest_batch),
        ", ".join(marks),
    )


def of_entries(loss: str, option: Option) -> str:
    """How often similarities are computed, or how they are kept."""
    if not option.kept:
        return "computed once" if loss == "siglip" else "computed twice"
    part = "kept" if option.kept > 0.995 else f"{option.kept:.0%} kept"
    return f"{part}, {_NAMES[option.kept_size]}"


def _encoders(option: Option) -> str:
    if option.chunk is None:
        return "at once"
    if not option.kept_graphs:
        return f"chunks of {option.chunk}, all twice"
    return f"chunks of {option.chunk}, {option.encoded_again:.0%} twice"


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


def operations(number: float) -> str:
    """The same of multiply-adds, two for each.

    >>> operations(465e3), operations(8.2e13)
    ('0.000465 G', '82 T')
    """
    for unit, of in (("G", 1e9), ("T", 1e12), ("P", 1e15)):
        if number < 999.5 * of:
            return f"{number / of:.3g} {unit}"
    return f"{number / 1e18:.3g} E"


def duration(seconds: float) -> str:
    """The same of seconds.

    >>> duration(0.0123), duration(0.9997), duration(75), duration(900), duration(1e6)
    ('12.3 ms', '1 s', '75 s', '15 min', '11.6 d')
    """
    for unit, of in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        following = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 172_800.0}[unit]
        if seconds < 0.9995 * following:
            return f"{seconds / of:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
