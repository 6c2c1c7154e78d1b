"""Count what a step of a declared loss holds, by steps of a few rows on this rank alone.

How many tensors of the size of a tile there are at a time depends on the user's functions: autograd keeps some of what
they compute. With tiles of side n and of side 2n, three by three of them each, everything but the tiles doubles:

    bytes(n) = bytes_per_entry n^2 + others n,    so    bytes_per_entry = (bytes(2n) - 2 bytes(n)) / 2 n^2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

import torch
from torch import Tensor

from .._base.live_bytes import bytes_held
from .._base.precision import accumulation_dtype
from ..comm import LocalCommunicator
from ..contract import Options, agree
from ..contract.options import collecting
from .arguments import Arguments
from .call import CALLER, Call
from .declaration import Declaration
from .pairs import PAIR

_SIDE, _TILES = 32, 3  # of the smaller tiles, and how many stand in a row
_WIDTH = 4  # of each similarity


def tiles_held(declaration: Declaration, call: Arguments) -> int:
    """Return how many times two tiles a step with such arguments holds at a time.

    Args:
        declaration: of the loss, used with such arguments before.
        call: the arguments; of their data some rows are taken, and features are random ones.
    """
    with torch.inference_mode(False), torch.enable_grad(), collecting(None):
        less, more = (_bytes_held(declaration, _few_rows(call, _TILES * side), side) for side in (_SIDE, 2 * _SIDE))
    bytes_per_entry = (more - 2 * less) / (2 * _SIDE**2)
    return max(1, ceil(bytes_per_entry / (2 * accumulation_dtype(call.x.dtype).itemsize)))


def _bytes_held(declaration: Declaration, call: Arguments, side: int) -> int:
    """Return the bytes that a step with tiles of this side holds, without compiled functions, which hold less.

    Its leaves have gradients before, as in a second step.
    """
    memory = 2 * side * side * accumulation_dtype(call.x.dtype).itemsize
    options = Options(LocalCommunicator(), None, "gather", memory)
    for leaf in _leaves(call):
        leaf.grad = torch.ones_like(leaf)

    def step() -> None:
        facts = agree(CALLER, options, call.inputs(None)).widened()
        loss = Call(declaration, call, facts, tiles=1).loss()
        if loss.requires_grad:
            loss.backward()

    return bytes_held(step)


def _leaves(call: Arguments) -> list[Tensor]:
    mappings = (call.x_data, call.y_data, call.candidate_data, call.parameters)
    tensors = [call.x, call.y, call.candidates, *(x for mapping in mappings for x in mapping.values())]
    return [x for x in tensors if isinstance(x, Tensor) and x.requires_grad]


def _few_rows(call: Arguments, rows: int) -> Arguments:
    """Return arguments of the same kinds with so many rows, and one own candidate of each."""
    generator = torch.Generator().manual_seed(0)

    def features(x: Any) -> Any:
        if x is None:
            return None
        width = _WIDTH * len(call.widths)
        values = torch.randn(rows, width, generator=generator, device="cpu").to(call.x.device, call.x.dtype)
        return values.requires_grad_(x.requires_grad)

    def data(numbers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: _sample(x, rows).requires_grad_(x.requires_grad) for name, x in numbers.items()}

    x_data, y_data = data(call.x_data), data(call.y_data)
    for numbers in (x_data, y_data):
        if PAIR in numbers:
            numbers[PAIR] = torch.arange(rows, device=call.x.device)
    parameters = {
        name: x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in call.parameters.items()
    }
    return replace(
        call,
        x=features(call.x),
        y=features(call.y),
        candidates=features(call.candidates),
        widths=dict.fromkeys(call.widths, _WIDTH),
        x_data=x_data,
        y_data=y_data,
        candidate_data=data(call.candidate_data),
        owners=torch.arange(rows if call.candidates is not None else 0, device=call.owners.device),
        x_lengths=None if call.x_lengths is None else (1,) * rows,
        y_lengths=None if call.y_lengths is None else (1,) * rows,
        parameters=parameters,
    )


def _sample(x: Tensor, rows: int) -> Tensor:
    x = x.detach()
    return x[torch.arange(rows, device=x.device) % len(x)] if len(x) else x.new_zeros(rows)
