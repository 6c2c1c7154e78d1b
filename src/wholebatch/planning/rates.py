"""What a machine does in a second, measured (see `calibrate`) or given, and from it the time of a step.

    seconds = call + flops / products(d) + entries not kept x entry(0) + entries kept x entry(bytes kept)
              + bytes written / memory + wire / bandwidth + messages x message

all of one rank while all ranks are busy. `products` grows with d, and is interpolated over log d; an entry of S is
exponentiated, summed and multiplied, which takes time beside the products, most of it for memory.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import log
from pathlib import Path

from .._user_error import UserError
from .work import LOSSES, Work


@dataclass(frozen=True)
class Rates:
    """Of one rank.

    Args:
        source: where they come from.
        products: {d: flops per second} of products with d numbers in a row, ascending.
        entry: {loss: {bytes kept: seconds}} of an entry of S, forward and backward; 0: computed twice.
        call: seconds of a step's calls, whatever its size.
        memory: bytes per second, of memory that is written for the first time.
        wire: bytes per second that a rank sends while all do.
        message: seconds of one that is small.
        capacity: bytes of memory of a device; None: of this machine, what is free.
        side_of: "cpu" or "cuda", whose tiles these are.
    """

    source: str
    products: Mapping[int, float]
    entry: Mapping[str, Mapping[int, float]]
    call: float
    memory: float
    wire: float
    message: float
    capacity: int | None = None
    side_of: str = "cpu"

    def flops(self, dim: int) -> float:
        """Of products with `dim` numbers in a row, per second."""
        known = sorted(self.products)
        at = bisect_left(known, dim)
        if at in (0, len(known)):
            return self.products[known[min(at, len(known) - 1)]]
        low, high = known[at - 1], known[at]
        part = log(dim / low) / log(high / low)
        return self.products[low] ** (1 - part) * self.products[high] ** part

    def of_entry(self, loss: str, size: int) -> float:
        """Seconds of an entry, of which so many bytes are kept."""
        sizes = self.entry[loss]
        return sizes[size] if size in sizes else sizes[max(sizes)] * (size / max(sizes) if max(sizes) else 1)

    def seconds(self, loss: str, dim: int, work: Work) -> float:
        """Of the step that takes this work."""
        entries = (work.entries - work.kept) * self.of_entry(loss, 0)
        if work.kept:
            entries += work.kept * self.of_entry(loss, work.kept_size)
        moved = work.wire / self.wire + work.messages * self.message if work.messages else 0.0
        written = (work.loss - work.kept * work.kept_size) / self.memory
        return self.call + work.flops / self.flops(dim) + entries + written + moved

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
            found = json.loads(path.read_text())
            found["products"] = {int(d): float(rate) for d, rate in found["products"].items()}
            found["entry"] = {
                loss: {int(kept): float(of) for kept, of in sizes.items()} for loss, sizes in found["entry"].items()
            }
            rates = cls(**found)
            if not rates.products or min(*rates.products.values(), rates.memory, rates.wire) <= 0:
                raise ValueError("rates must be above 0")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} does not hold rates that `wholebatch plan --measure --save` wrote: {error}") from error
        return rates

    def with_bandwidth(self, wire: float | None) -> Rates:
        """The same, with another network."""
        return self if wire is None else replace(self, wire=wire)
