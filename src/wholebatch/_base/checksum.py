"""A checksum of a tensor, computed on its device: another bit, sign or order of entries gives another number."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_BLOCK = 2**18  # words that are multiplied at once: 2 MB
_STEP = 0x5851F42D4C957F2D  # odd, of no pattern
_WORDS = {1: torch.int8, 2: torch.int16}  # by the size of an entry; larger ones are several words of 32 bits


def checksum(x: Tensor) -> Tensor:
    """Return sum_i w_i x_i modulo 2^64 over the words of x; weights are odd, so one changed word changes the sum."""
    entries = torch.view_as_real(x) if x.is_complex() else x
    words = entries.contiguous().view(-1).view(_WORDS.get(entries.element_size(), torch.int32))
    total, weights = torch.zeros((), dtype=torch.int64, device=x.device), _weights(x.device)
    for block in words.split(_BLOCK):
        total = total * _STEP + (block * weights[: len(block)]).sum()
    return total


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Return odd numbers, the same in every process."""
    generator = torch.Generator("cpu").manual_seed(0)  # whatever the default device is
    return torch.randint(-(2**62), 2**62, (_BLOCK,), generator=generator, device="cpu").to(device) * 2 + 1
