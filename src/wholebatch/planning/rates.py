"""The rates of a machine, measured (see `calibrate`) or given, and the time of a step that follows from them.

    seconds = call + flops / products(d) + bytes that tiles read and write / tiles
              + bytes of the loss / memory + bytes sent / wire + messages x message

all of one rank while all ranks are busy. Products are faster the larger d is: their rate is interpolated over log d.
Importing this module imports no torch.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import inf, log
from pathlib import Path

from .._base.bounded_json import parse_json
from .._base.files import read_bounded
from .._base.user_error import UserError

_MOST_BYTES = 2**20


@dataclass(frozen=True)
class Work:
    """The work of one step on the rank with most."""

    flops: float  # two for each multiply-add
    moved: float  # bytes that operations on tiles read and write
    kept: float  # the part of S, or of winners, that is kept from the forward pass for the backward pass, from 0 to 1
    kept_size: int  # bytes of a kept entry; in late interaction `sizes.WINNERS`
    loss: int  # bytes at the peak of the loss beside features and their gradients
    wire: float  # bytes that the rank sends
    messages: int  # collectives, or messages to other ranks, one after the other


@dataclass(frozen=True)
class Rates:
    """The rates of one rank.

    Args:
        source: where the rates come from.
        products: {d: flops per second} of the products for S and for its gradients.
        tiles: {loss: bytes per second} that operations on the loss's tiles read and write; a loss that was not measured
            has the rate of "clip".
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
    tiles: Mapping[str, float]
    call: float
    memory: float
    wire: float | None
    message: float
    encoders: float
    capacity: int | None = None
    device: str = "cpu"
    dtype: str | None = None
    ranks: int | None = None

    def seconds(self, loss: str, embedding_size: int, work: Work) -> float:
        """Return the seconds of a step with this work."""
        moved = work.moved / self.tiles.get(loss, self.tiles["clip"]) + work.loss / self.memory
        sent = 0.0
        if work.messages:
            assert self.wire is not None
            sent = work.wire / self.wire + work.messages * self.message
        return self.call + work.flops / at_size(self.products, embedding_size) + moved + sent

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
            values["products"] = {int(d): float(rate) for d, rate in values["products"].items()}
            rates = cls(**values)
            rates.check()
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"{path} does not hold rates as `wholebatch plan --measure --save` writes them: {error}"
            ) from error
        return rates

    def check(self) -> None:
        """Raise ValueError unless all rates are positive numbers and all times nonnegative ones."""
        wire = () if self.wire is None else (self.wire,)
        above = (*self.products.values(), *self.tiles.values(), self.memory, self.encoders, *wire)
        sound = all(0 < rate < inf for rate in above) and all(0 <= x < inf for x in (self.call, self.message))
        if not sound or not self.products or "clip" not in self.tiles:
            raise ValueError("rates must be finite and above 0, and seconds finite and at least 0; tiles need 'clip'")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'cpu' or 'cuda', got {self.device!r}")

    def with_wire(self, wire: float | None) -> Rates:
        """Return the same rates with another network, if one is given."""
        return self if wire is None else replace(self, wire=wire, source=f"{self.source}; network as given")


def check_rates(rates: Rates, dtype: str, device: str, ranks: int) -> None:
    """Raise an error unless the rates were taken for this dtype, device and number of ranks."""
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
    if ranks > 1 and rates.wire is None:
        raise UserError(f"these rates are of one rank, without a network: measure on {ranks} ranks, or give bandwidth")


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
