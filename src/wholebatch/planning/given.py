"""Rates without a measurement on this machine: those of one CPU, and of cards by their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from .._user_error import UserError
from ..losses.catalog import CATALOG
from .rates import Rates
from .shapes import LOSSES, PARTIAL_FC


@dataclass(frozen=True)
class Card:
    """The data sheet of a GPU: flops per second, bytes per second, bytes.

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
_WITHOUT_BFLOAT16 = ("t4", "v100")
DEVICES = ("cpu", "cuda", *_CARDS)
_SHARE, _OF_ENCODERS = 0.7, 0.4  # of a data sheet's figures that are assumed
# Bytes of tiles in memory for each entry: product, scale, exponential, sums; then once more, factors, two products.
_ENTRY_BYTES = {0: 88, 2: 72, 4: 76, 8: 152}
# Measured on one rank with two cores of an AMD EPYC, torch 2.13, rounded.
_CPU_PRODUCTS = {16: 90e9, 64: 120e9, 256: 150e9, 1024: 150e9}
_CPU_ENTRY = {
    "clip": {0: 3e-9, 2: 3e-9, 4: 3.2e-9},
    "info_nce": {0: 2e-9, 2: 2.2e-9, 4: 2.4e-9},
    "siglip": {0: 2.5e-9},
    "nt_xent": {0: 4e-9, 2: 3e-9, 4: 4e-9},
    "sup_con": {0: 6e-9, 4: 6e-9},
    PARTIAL_FC: {0: 3e-9, 2: 2.5e-9, 4: 3.5e-9},
}
_UNMEASURED = {"towers": "clip", "views": "nt_xent", "labeled": "sup_con"}  # a loss without an entry counts as this one


def given(device: str, dtype: torch.dtype) -> Rates:
    """Return the rates of a device of `DEVICES`.

    Raises:
        UserError: for "cuda" where there is no GPU, or an unknown one.
    """
    wide = dtype == torch.float64
    if device == "cpu":
        slower = 2.0 if wide else 1.0
        products = {d: rate / slower for d, rate in _CPU_PRODUCTS.items()}
        entry = {loss: {kept: slower * of for kept, of in _cpu_entry(loss).items()} for loss in LOSSES}
        source = "given, of two cores of an AMD EPYC for each rank; --measure measures those of this machine"
        return Rates(
            source, products, products, entry, call=2e-3, memory=2e9, wire=1e9, message=1e-3, encoders=products[1024]
        )
    name = _card_here() if device == "cuda" else device
    card = _CARDS[name]
    tensor_cores = dtype == torch.float16 or (dtype == torch.bfloat16 and name not in _WITHOUT_BFLOAT16)
    products = {512: _SHARE * (card.float64 if wide else card.float32)}
    bytes_of_entry = {kept: of * (2 if wide else 1) for kept, of in _ENTRY_BYTES.items()}
    return Rates(
        f"given, {_SHARE:.0%} of the data sheet of {card.name}, products in {'float64' if wide else 'float32'}",
        products,
        products,
        {loss: {kept: of / (_SHARE * card.memory) for kept, of in bytes_of_entry.items()} for loss in LOSSES},
        call=2e-3,
        memory=_SHARE * card.memory,
        wire=_SHARE * card.wire,
        message=2e-5,
        encoders=_OF_ENCODERS * (card.half if tensor_cores else card.float64 if wide else card.float32),
        capacity=card.capacity,
        device="cuda",
    )


def _cpu_entry(loss: str) -> dict[int, float]:
    """Return {bytes kept: seconds} of an entry of S on a CPU."""
    return _CPU_ENTRY[loss] if loss in _CPU_ENTRY else _CPU_ENTRY[_UNMEASURED[CATALOG[loss].kind]]


def _card_here() -> str:
    """Return the name of this machine's GPU in `_CARDS`."""
    if not torch.cuda.is_available():
        raise UserError(f"there is no GPU here; name one of {', '.join(_CARDS)} to plan for it, or --device cpu")
    found = card_named(torch.cuda.get_device_name())
    if found is None:
        raise UserError(f"rates of {torch.cuda.get_device_name()!r} are not known: measure them with --measure")
    return found


def card_named(text: str) -> str | None:
    """Return the card to which CUDA gives this name; None if it is unknown.

    >>> card_named("NVIDIA H200"), card_named("NVIDIA GeForce RTX 4090"), card_named("NVIDIA A100-SXM4-80GB")
    ('h200', 'rtx4090', 'a100')
    >>> card_named("NVIDIA L40S"), card_named("NVIDIA GH200 480GB"), card_named("NVIDIA H100 PCIe")
    (None, None, None)
    """
    words = re.split("[^a-z0-9]+", text.lower().replace("rtx ", "rtx"))
    return None if "pcie" in words else next((name for name in _CARDS if name in words), None)
