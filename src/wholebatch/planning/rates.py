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
from dataclasses import asdict, dataclass, replace
from math import log
from pathlib import Path

import torch

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
        encoders: flops per second of encoders.
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
    encoders: float
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
        written = work.loss / self.memory
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
            raise UserError(f"{path} does not hold what `wholebatch plan --measure --save` writes: {error}") from error
        return rates

    def with_wire(self, wire: float | None) -> Rates:
        """The same, with another network."""
        return self if wire is None else replace(self, wire=wire, source=f"{self.source}; network as given")


@dataclass(frozen=True)
class Card:
    """Of a GPU, as its maker's data sheet says: flops per second, bytes per second, bytes.

    Sweeps multiply in float32 (or float64), whatever the features' dtype, as PyTorch does unless TF32 is allowed.
    """

    name: str
    float32: float
    float64: float
    half: float  # of tensor cores
    memory: float
    wire: float  # NVLink in one direction, else PCIe
    capacity: int


_CARDS = {
    "t4": Card("NVIDIA T4", 8.1e12, 0.25e12, 65e12, 0.32e12, 16e9, 16 * 10**9),
    "v100": Card("NVIDIA V100 SXM2", 15.7e12, 7.8e12, 125e12, 0.9e12, 150e9, 32 * 10**9),
    "l4": Card("NVIDIA L4", 30.3e12, 0.47e12, 121e12, 0.3e12, 32e9, 24 * 10**9),
    "rtx4090": Card("NVIDIA RTX 4090", 82.6e12, 1.3e12, 165e12, 1.0e12, 32e9, 24 * 10**9),
    "a100": Card("NVIDIA A100 SXM 80 GB", 19.5e12, 9.7e12, 312e12, 2.0e12, 300e9, 80 * 10**9),
    "h100": Card("NVIDIA H100 SXM", 67e12, 34e12, 989e12, 3.35e12, 450e9, 80 * 10**9),
    "h200": Card("NVIDIA H200 SXM", 67e12, 34e12, 989e12, 4.8e12, 450e9, 141 * 10**9),
    "b200": Card("NVIDIA B200", 75e12, 37e12, 2250e12, 8e12, 900e9, 180 * 10**9),
}
DEVICES = ("cpu", "cuda", *_CARDS)
_SHARE, _OF_ENCODERS = 0.7, 0.4  # of what a data sheet says, that is reckoned with
# Bytes of tiles in memory for each entry: product, scale, exponential, sums; then once more, factors, two products.
_ENTRY_BYTES = {0: 88, 2: 72, 4: 76, 8: 152}
# Of one rank with two cores of an AMD EPYC, torch 2.13, rounded.
_CPU_PRODUCTS = {16: 90e9, 64: 120e9, 256: 150e9, 1024: 150e9}
_CPU_ENTRY = {
    "clip": {0: 3e-9, 2: 3e-9, 4: 3.2e-9},
    "info_nce": {0: 2e-9, 2: 2.2e-9, 4: 2.4e-9},
    "siglip": {0: 2.5e-9},
    "nt_xent": {0: 4e-9, 2: 3e-9, 4: 4e-9},
    "sup_con": {0: 6e-9, 4: 6e-9},
    "partial_fc": {0: 3e-9, 2: 2.5e-9, 4: 3.5e-9},
}


def given(device: str, dtype: torch.dtype) -> Rates:
    """Rates that nobody has measured on the machine at hand.

    Raises:
        UserError: for a device that is not known.
    """
    wide = dtype == torch.float64
    if device == "cpu":
        slower = 2.0 if wide else 1.0
        products = {d: rate / slower for d, rate in _CPU_PRODUCTS.items()}
        entry = {loss: {kept: slower * of for kept, of in sizes.items()} for loss, sizes in _CPU_ENTRY.items()}
        source = "given, of two cores of an AMD EPYC for each rank; --measure takes those of this machine"
        return Rates(source, products, entry, call=2e-3, memory=2e9, wire=1e9, message=1e-3, encoders=products[1024])
    name = device
    if device == "cuda":
        found = torch.cuda.get_device_name().lower().replace(" ", "") if torch.cuda.is_available() else None
        if found is None:
            raise UserError(f"there is no GPU here; name one of {', '.join(_CARDS)} to plan for it, or --device cpu")
        names = sorted(_CARDS, key=len, reverse=True)
        name = next((card for card in names if card in found), "")
        if not name:
            raise UserError(f"rates of {torch.cuda.get_device_name()!r} are not known: measure them, with --measure")
    if name not in _CARDS:
        raise UserError(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    card = _CARDS[name]
    bytes_of_entry = {kept: of * (2 if wide else 1) for kept, of in _ENTRY_BYTES.items()}
    return Rates(
        f"given, {_SHARE:.0%} of the data sheet of {card.name}, products in {'float64' if wide else 'float32'}",
        {512: _SHARE * (card.float64 if wide else card.float32)},
        {loss: {kept: of / (_SHARE * card.memory) for kept, of in bytes_of_entry.items()} for loss in LOSSES},
        call=2e-3,
        memory=_SHARE * card.memory,
        wire=_SHARE * card.wire,
        message=2e-5,
        encoders=_OF_ENCODERS * {2: card.half, 4: card.float32, 8: card.float64}[dtype.itemsize],
        capacity=card.capacity,
        side_of="cuda",
    )
