"""What a machine does in a second, measured (see `calibrate`) or given, and from it the time of a step.

    seconds = call + flops / products(d) + flops that compute S once more / again(d)
              + entries not kept x entry(0) + entries kept x entry(bytes kept)
              + bytes of the loss / memory + wire / bandwidth + messages x message

all of one rank while all ranks are busy. Products are faster the larger d is, those of S not as those of gradients;
between widths rates are interpolated over log d. An entry of S is exponentiated, summed and multiplied, which takes
time beside the products, most of it for memory.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path

from .._bounded_json import parse_json
from .._files import read_bounded
from .._user_error import UserError
from .work import Work

_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Rates:
    """Of one rank.

    Args:
        source: where they come from.
        products: {d: flops per second} of S and of both gradients' products, with d numbers in a row.
        again: the same of S alone.
        entry: {loss: {bytes kept: seconds}} of an entry of S, forward and backward; 0: computed twice.
        call: seconds of a step's calls, whatever its size.
        memory: bytes per second, of memory that is written for the first time.
        wire: bytes per second that a rank sends while all do; None: not known, for there was one rank.
        message: seconds of one that is small.
        encoders: flops per second of encoders.
        capacity: bytes of memory of a device; None: of this machine, what is free.
        device: "cpu" or "cuda".
        dtype: of the features with which they were measured; None: of none in particular.
        ranks: on a CPU, whose cores they share, the same; None: of any number.
    """

    source: str
    products: Mapping[int, float]
    again: Mapping[int, float]
    entry: Mapping[str, Mapping[int, float]]
    call: float
    memory: float
    wire: float | None
    message: float
    encoders: float
    capacity: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    ranks: int | None = None

    def of_entry(self, loss: str, size: int) -> float:
        """Seconds of an entry, of which so many bytes are kept."""
        sizes = self.entry[loss]
        nearest = min(sizes, key=lambda known: abs(known - size))
        return sizes[nearest] * (size / nearest if nearest and size else 1)

    def seconds(self, loss: str, dim: int, work: Work) -> float:
        """Of the step that takes this work."""
        entries = (work.entries - work.kept) * self.of_entry(loss, 0)
        if work.kept:
            entries += work.kept * self.of_entry(loss, work.kept_size)
        moved = 0.0
        if work.messages:
            assert self.wire is not None
            moved = work.wire / self.wire + work.messages * self.message
        products = seconds_of_products(work, at_width(self.products, dim), at_width(self.again, dim))
        written = work.loss / self.memory
        return self.call + products + entries + written + moved

    def to_json(self) -> str:
        """`from_json` is its inverse."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, path: Path) -> Rates:
        """Read what `to_json` wrote.

        Raises:
            UserError: if the file is not that.
        """
        try:
            found = parse_json(read_bounded(path.resolve(), _MOST_BYTES), "it")
            for name in ("products", "again"):
                found[name] = {int(d): float(rate) for d, rate in found[name].items()}
            found["entry"] = {
                loss: {int(kept): float(of) for kept, of in sizes.items()} for loss, sizes in found["entry"].items()
            }
            rates = cls(**found)
            rates.check()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} does not hold what `wholebatch plan --measure --save` writes: {error}") from error
        return rates

    def check(self) -> None:
        """Raise ValueError unless they are numbers, and can be divided by."""
        above = (*self.products.values(), *self.again.values(), self.memory, self.encoders)
        others = (self.call, self.message, *(of for sizes in self.entry.values() for of in sizes.values()))
        sound = all(0 < rate < inf for rate in above) and all(0 <= of < inf for of in others)
        if not sound or not self.products or not self.again or (self.wire is not None and not 0 < self.wire < inf):
            raise ValueError("rates must be finite and above 0, seconds not below")
        if not self.entry or not all(0 in sizes for sizes in self.entry.values()):
            raise ValueError("each loss needs the seconds of an entry that is not kept, 0")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")

    def with_wire(self, wire: float | None) -> Rates:
        """The same, with another network."""
        return self if wire is None else replace(self, wire=wire, source=f"{self.source}; network as given")


def seconds_of_products(work: Work, products: float, again: float) -> float:
    """Of a step's multiply-adds, at two rates in flops per second: S once more, and all others."""
    return (work.flops - work.again) / products + work.again / again


def at_width(rates: Mapping[int, float], dim: int) -> float:
    """The rate at d, between those that are known.

    >>> round(at_width({16: 1.0, 64: 4.0}, 32), 6), at_width({16: 1.0, 64: 4.0}, 1000)
    (2.0, 4.0)
    """
    known = sorted(rates)
    at = bisect_left(known, dim)
    if at in (0, len(known)):
        return rates[known[min(at, len(known) - 1)]]
    low, high = known[at - 1], known[at]
    part = log(dim / low) / log(high / low)
    return float(rates[low] ** (1 - part) * rates[high] ** part)
