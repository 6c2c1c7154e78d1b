"""The data sheets of GPUs, and the devices for which a plan can be made. This module imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass


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


def card_named(text: str) -> str | None:
    """Return the card to which CUDA gives this name; None if it is unknown.

    >>> card_named("NVIDIA H200"), card_named("NVIDIA GeForce RTX 4090"), card_named("NVIDIA A100-SXM4-80GB")
    ('h200', 'rtx4090', 'a100')
    >>> card_named("NVIDIA L40S"), card_named("NVIDIA GH200 480GB"), card_named("NVIDIA H100 PCIe")
    (None, None, None)
    """
    words = re.split("[^a-z0-9]+", text.lower().replace("rtx ", "rtx"))
    return None if "pcie" in words else next((name for name in CARDS if name in words), None)
