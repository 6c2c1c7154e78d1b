"""Random numbers that depend on a seed, a step and a class alone: not on the rank or the device of the class.

A counter-based generator (SplitMix64: Steele, Lea and Flood, 2014, doi:10.1145/2660193.2660195) computes each random
number from a counter, not from earlier draws. So a sample of classes is the same on any number of ranks, after a
restart on another number of ranks, and on a GPU as on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_BITS = 53  # bits of a uniform number


def drawn_classes(rate: float, classes: slice, *, seed: int, step: int, device: torch.device) -> Tensor:
    """Return whether each of some consecutive classes is drawn, independently with probability `rate`.

    >>> cpu = torch.device("cpu")
    >>> drawn = drawn_classes(0.25, slice(0, 100_000), seed=0, step=3, device=cpu)
    >>> round(drawn.double().mean().item(), 2)
    0.25
    >>> torch.equal(drawn_classes(0.25, slice(7, 9), seed=0, step=3, device=cpu), drawn[7:9])
    True
    """
    drawn, key = torch.empty(classes.stop - classes.start, dtype=torch.bool, device=device), mix(mix(seed) + step)
    most = 2**15 if device.type == "cpu" else 2**24  # few, to fit a CPU's cache; many, to keep a GPU busy
    for start in range(0, len(drawn), most):  # some at a time, because an id alone takes 8 bytes
        part, first = drawn[start : start + most], classes.start + start
        part.copy_(_mix(torch.arange(first, first + len(part), device=device), key=key) < int(rate * 2**_BITS))
    return drawn


def _mix(ids: Tensor, *, key: int) -> Tensor:
    """Return uniform numbers in [0, 2^53), int64."""
    x = (ids + 1) * _to_signed(_GOLDEN) + _to_signed(key)
    for shift, factor in _FACTORS:
        x = (x ^ _shift(x, shift)) * _to_signed(factor)
    return _shift(x ^ _shift(x, 31), 64 - _BITS)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Return x / 2^bits, rounded down, of unsigned numbers that are stored as int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: int) -> int:
    """Return the function of `_mix` of one number: 64 bits, unsigned."""
    mask = (1 << 64) - 1
    x = (x + 1) * _GOLDEN & mask
    for shift, factor in _FACTORS:
        x = (x ^ x >> shift) * factor & mask
    return x ^ x >> 31


def _to_signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x
