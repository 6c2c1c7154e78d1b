"""Bytes, operations and seconds as text."""

from __future__ import annotations


def amount(number: float) -> str:
    """Return a number of bytes in a readable unit.

    >>> amount(0), amount(2_345_678), amount(141e9)
    ('0 B', '2.35 MB', '141 GB')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if number < 999.5 or unit == "TB":
            return f"{number:.3g} {unit}"
        number /= 1000
    raise AssertionError


def operations(number: float) -> str:
    """Return a number of operations in a readable unit; a multiply-add is two.

    >>> operations(465e3), operations(8.2e13)
    ('0.000465 G', '82 T')
    """
    for unit, scale in (("G", 1e9), ("T", 1e12), ("P", 1e15)):
        if number < 999.5 * scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number / 1e18:.3g} E"


def duration(seconds: float) -> str:
    """Return a number of seconds in a readable unit.

    >>> duration(0.0123), duration(0.9997), duration(75), duration(900), duration(1e6)
    ('12.3 ms', '1 s', '75 s', '15 min', '11.6 d')
    """
    for unit, scale in (("ms", 1e-3), ("s", 1.0), ("min", 60.0), ("h", 3600.0)):
        following = {"ms": 1.0, "s": 120.0, "min": 7200.0, "h": 172_800.0}[unit]
        if seconds < 0.9995 * following:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"
