"""The rates of a machine, measured (see `calibrate`) or given, and the time of a step that follows from them.

    seconds = call + flops / products(d) + flops that compute S once more / again(d)
              + entries not kept x entry(0) + entries kept x entry(bytes kept)
              + bytes of the loss / memory + wire / bandwidth + messages x message

all of one rank while all ranks are busy. Products are faster the larger d is, and differ between S and gradients;
rates are interpolated over log d. An entry of S is exponentiated, summed and multiplied, which takes time in addition
to the products, most of it for memory.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path
from typing import TYPE_CHECKING

from .._base.bounded_json import parse_json
from .._base.files import read_bounded
from .._base.user_error import UserError

if TYPE_CHECKING:  # it imports torch
    from .counted import Work

_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Rates:
    """The rates of one rank.

    Args:
        source: where the rates come from.
        products: {d: flops per second} of the products for S and for both gradients.
        again: {d: flops per second} of the product for S alone.
        entry: {loss: {bytes kept: seconds}} of an entry of S, forward and backward; 0 bytes: computed twice.
        call: seconds of a step's calls, independent of its size.
        memory: bytes per second of memory that is written for the first time.
        wire: bytes per second that a rank sends while all do; None: measured on one rank.
        message: seconds of a small message.
        encoders: flops per second of encoders.
        capacity: bytes of a device's memory; None: the free memory of this machine.
        device: "cpu" or "cuda".
        dtype: of the features in the measurement; None: any.
        ranks: in the measurement, on a CPU, whose cores they share; None: any.
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
        """Return the seconds of an entry of which `size` bytes are kept."""
        sizes = self.entry[loss]
        nearest = min(sizes, key=lambda known: abs(known - size))
        return sizes[nearest] * (size / nearest if nearest and size else 1)

    def seconds(self, loss: str, embedding_size: int, work: Work) -> float:
        """Return the seconds of a step with this work."""
        entries = (work.entries - work.kept) * self.of_entry(loss, 0)
        if work.kept:
            entries += work.kept * self.of_entry(loss, work.kept_size)
        moved = 0.0
        if work.messages:
            assert self.wire is not None
            moved = work.wire / self.wire + work.messages * self.message
        products = seconds_of_products(
            work, at_size(self.products, embedding_size), at_size(self.again, embedding_size)
        )
        written = work.loss / self.memory
        return self.call + products + entries + written + moved

    def to_json(self) -> str:
        """Return JSON text; `from_json` is its inverse."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, path: Path) -> Rates:
        """Read the text of `to_json` from a file.

        Raises:
            UserError: if the file does not hold it.
        """
        try:
            values = parse_json(read_bounded(path.resolve(), _MOST_BYTES), "it")
            for name in ("products", "again"):
                values[name] = {int(d): float(rate) for d, rate in values[name].items()}
            values["entry"] = {
                loss: {int(kept): float(x) for kept, x in sizes.items()} for loss, sizes in values["entry"].items()
            }
            rates = cls(**values)
            rates.check()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} does not hold rates as `wholebatch plan --measure --save` writes them: {error}"
            ) from error
        return rates

    def check(self) -> None:
        """Raise ValueError unless all rates are positive numbers and all times nonnegative ones."""
        above = (*self.products.values(), *self.again.values(), self.memory, self.encoders)
        others = (self.call, self.message, *(x for sizes in self.entry.values() for x in sizes.values()))
        sound = all(0 < rate < inf for rate in above) and all(0 <= x < inf for x in others)
        if not sound or not self.products or not self.again or (self.wire is not None and not 0 < self.wire < inf):
            raise ValueError("rates must be finite and above 0, and seconds finite and at least 0")
        if not self.entry or not all(0 in sizes for sizes in self.entry.values()):
            raise ValueError("each loss needs the seconds of an entry that is not kept, 0")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")

    def with_entry(self, loss: str, times: float) -> Rates:
        """Return the same rates with an estimate for a declared loss: so many times the time of an entry of CLIP's."""
        seconds = self.of_entry("clip", 0) * times
        source = f"{self.source}; time of the functions of {loss} by the bytes that they move, not measured"
        return replace(self, entry={**self.entry, loss: {0: seconds}}, source=source)

    def with_wire(self, wire: float | None) -> Rates:
        """Return the same rates with another network, if one is given."""
        return self if wire is None else replace(self, wire=wire, source=f"{self.source}; network as given")


def check_rates(rates: Rates, loss: str, dtype: str, device: str, ranks: int) -> None:
    """Raise an error unless the rates were taken for this loss, dtype, device and number of ranks."""
    rates.check()
    kind = "cpu" if device == "cpu" else "cuda"
    for name, theirs, ours in (
        ("device", rates.device, kind),
        ("dtype", rates.dtype, dtype),
        ("ranks", rates.ranks, ranks),
    ):
        if theirs is not None and theirs != ours:
            raise UserError(
                f"these rates were measured for {name} {theirs}, and this is a plan for {ours}: measure again"
            )
    if loss not in rates.entry:
        raise UserError(f"these rates are of {', '.join(rates.entry)}: measure them with --loss {loss}")
    if ranks > 1 and rates.wire is None:
        raise UserError(f"these rates are of one rank, without a network: measure on {ranks} ranks, or give bandwidth")


def seconds_of_products(work: Work, products: float, again: float) -> float:
    """Return the seconds of a step's products; `again` is the rate of those that compute S a second time."""
    return (work.flops - work.again) / products + work.again / again


def at_size(rates: Mapping[int, float], embedding_size: int) -> float:
    """Return the rate at d, interpolated between known sizes.

    >>> round(at_size({16: 1.0, 64: 4.0}, 32), 6), at_size({16: 1.0, 64: 4.0}, 1000)
    (2.0, 4.0)
    """
    known = sorted(rates)
    i = bisect_left(known, embedding_size)
    if i in (0, len(known)):
        return rates[known[min(i, len(known) - 1)]]
    low, high = known[i - 1], known[i]
    part = log(embedding_size / low) / log(high / low)
    return float(rates[low] ** (1 - part) * rates[high] ** part)
