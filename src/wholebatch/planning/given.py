"""Rates without a measurement on this machine: those of one CPU, and of cards by their data sheets.

Importing this module imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .._base.user_error import UserError
from .rates import Rates

if TYPE_CHECKING:
    import torch

_WITHOUT_BFLOAT16 = ("t4", "v100")
_SHARE, _OF_ENCODERS = 0.7, 0.4  # of a data sheet's figures that are assumed
_HALVES = 4 / 3  # times as fast: the product scales, and dS has two bytes
# Measured on one rank with two cores of an AMD EPYC, torch 2.13, rounded.
_CPU_PRODUCTS = {16: 90e9, 64: 120e9, 256: 150e9, 1024: 150e9}
_CPU_TILES = {"clip": 30e9, "max_sim": 20e9}


@dataclass(frozen=True)
class Card:
    """The data sheet of a GPU: flops per second, bytes per second, bytes."""

    name: str
    float32: float
    float64: float
    half: float  # of tensor cores
    memory: float
    wire: float  # NVLink in one direction, else PCIe
    capacity: int


CARDS = {
    "t4": Card("NVIDIA T4", 8.1e12, 0.25e12, 65e12, 0.32e12, 16e9, 16 * 10**9),
    "v100": Card("NVIDIA V100 SXM2", 15.7e12, 7.8e12, 125e12, 0.9e12, 150e9, 32 * 10**9),
    "l4": Card("NVIDIA L4", 30.3e12, 0.47e12, 121e12, 0.3e12, 32e9, 24 * 10**9),
    "rtx4090": Card("NVIDIA RTX 4090", 82.6e12, 1.3e12, 165e12, 1.0e12, 32e9, 24 * 10**9),
    "a100": Card("NVIDIA A100 SXM 80 GB", 19.5e12, 9.7e12, 312e12, 2.0e12, 300e9, 80 * 10**9),
    "h100": Card("NVIDIA H100 SXM", 67e12, 34e12, 989e12, 3.35e12, 450e9, 80 * 10**9),
    "h200": Card("NVIDIA H200 SXM", 67e12, 34e12, 989e12, 4.8e12, 450e9, 141 * 10**9),
    "b200": Card("NVIDIA B200", 75e12, 37e12, 2250e12, 8e12, 900e9, 180 * 10**9),
}
DEVICES = ("cpu", "cuda", *CARDS)


def given(device: str, dtype: torch.dtype) -> Rates:
    """Return the rates of a device of `DEVICES`.

    Raises:
        UserError: for "cuda" where there is no GPU, or an unknown one.
    """
    name_of_dtype = str(dtype).removeprefix("torch.")
    wide = name_of_dtype == "float64"
    if device == "cpu":
        products = {d: rate / (2 if wide else 1) for d, rate in _CPU_PRODUCTS.items()}
        return Rates(
            "given, of two cores of an AMD EPYC for each rank; --measure measures those of this machine",
            products, _CPU_TILES, call=2e-3, memory=2e9, wire=1e9, message=1e-3, encoders=products[1024],
        )  # fmt: skip
    name = _local_card() if device == "cuda" else device
    card = CARDS[name]
    tensor_cores = name_of_dtype == "float16" or (name_of_dtype == "bfloat16" and name not in _WITHOUT_BFLOAT16)
    flops = card.half if tensor_cores else card.float64 if wide else card.float32
    return Rates(
        f"given, {_SHARE:.0%} of the data sheet of {card.name}, products in "
        f"{name_of_dtype if tensor_cores or wide else 'float32'}",
        {512: _SHARE * flops},
        {"clip": _SHARE * card.memory * (_HALVES if tensor_cores else 1)},
        call=2e-3,
        memory=_SHARE * card.memory,
        wire=_SHARE * card.wire,
        message=2e-5,
        encoders=_OF_ENCODERS * flops,
        capacity=card.capacity,
        device="cuda",
    )


def card_named(text: str) -> str | None:
    """Return the card to which CUDA gives this name; None if it is unknown.

    >>> card_named("NVIDIA H200"), card_named("NVIDIA GeForce RTX 4090"), card_named("NVIDIA A100-SXM4-80GB")
    ('h200', 'rtx4090', 'a100')
    >>> card_named("NVIDIA L40S"), card_named("NVIDIA GH200 480GB"), card_named("NVIDIA H100 PCIe")
    (None, None, None)
    """
    words = re.split("[^a-z0-9]+", text.lower().replace("rtx ", "rtx"))
    return None if "pcie" in words else next((name for name in CARDS if name in words), None)


def _local_card() -> str:
    """Return the name of this machine's GPU in `CARDS`."""
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"there is no GPU here; name one of {', '.join(CARDS)} to plan for it, or --device cpu")
    name = card_named(torch.cuda.get_device_name())
    if name is None:
        raise UserError(f"rates of {torch.cuda.get_device_name()!r} are not known: measure them with --measure")
    return name
