"""Comparators that raise and report the ratio: a ratio of W is a missing or doubled reduction."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_same(actual: Tensor, expected: Tensor, *, relative: float, absolute: float = 0.0, what: str = "") -> None:
    """Raise unless max |actual - expected| <= relative * max |expected| + absolute."""
    __tracebackhide__ = True
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    if actual.numel() == 0:
        return
    actual, expected = actual.detach().double(), expected.detach().double()
    error = (actual - expected).abs().max().item()
    size = expected.abs().max().item()
    if not error <= relative * size + absolute:
        ratio = (torch.vdot(actual.flatten(), expected.flatten()) / expected.square().sum()).item()
        raise AssertionError(
            f"{what}: largest error {error:.3g}, largest entry {size:.3g}, relative {error / size if size else 0:.3g}; "
            f"actual is about {ratio:.6g} x expected"
        )
