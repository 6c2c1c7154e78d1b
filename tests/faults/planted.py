"""Planted defects: losses with a mistake that the campaign must classify correctly."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch
from good_calls import PLANTED, Arguments, Good, Results, World
from torch import Tensor

import wholebatch as wb


def _dense(of_ranks: list[Arguments], _settings_of: int) -> list[Results]:
    x = torch.cat([of["x"].double() for of in of_ranks])
    return [{"value": x.square().sum()}] * len(of_ranks)


def _silent(comm: wb.comm.Communicator, x: Tensor) -> Tensor:
    """Return a result for any input."""
    x = x if isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu" else torch.zeros(1)
    x = x.detach().to_padded_tensor(0.0) if x.is_nested else x.detach()
    return comm.all_reduce(x.abs().double().square().nan_to_num(0.0, 0.0).sum())


def _hangs(comm: wb.comm.Communicator, x: Tensor) -> Tensor:
    """Wait forever if one rank has a fault."""
    wrong = not (isinstance(x, Tensor) and x.dtype == torch.float64 and x.shape == (3, 2))
    if comm.all_reduce(torch.tensor(float(wrong))).item():
        while True:
            torch.ones(1).sum()
    return comm.all_reduce(x.square().sum())


def _aborts(comm: wb.comm.Communicator, x: Tensor) -> Tensor:
    """End a healthy process if another one has a fault."""
    wrong = not (isinstance(x, Tensor) and x.dtype == torch.float64 and x.shape == (3, 2))
    if comm.all_reduce(torch.tensor(float(wrong))).item() and not wrong:
        os.abort()
    return comm.all_reduce(x.square().sum())


def _alone(comm: wb.comm.Communicator, x: Tensor) -> Tensor:
    """Raise before the other ranks are informed."""
    if not (isinstance(x, Tensor) and x.dtype == torch.float64 and x.shape == (3, 2)):
        raise ValueError("x is wrong, and no other rank is informed")
    return comm.all_reduce(x.square().sum())


def _make(loss: Callable[[wb.comm.Communicator, Tensor], Tensor], world: World) -> Good:
    arguments: list[Arguments] = [{"x": world.normal(f"x {rank}", 3, 2)} for rank in range(world.size)]

    def call(_made: None, given: Arguments, _backward: bool) -> Results:
        return {"value": loss(world.communicator(), **given)}

    return Good(arguments, {"x": None}, call, _dense)


PLANTED |= {
    "planted silent": partial(_make, _silent),
    "planted hang": partial(_make, _hangs),
    "planted abort": partial(_make, _aborts),
    "planted alone": partial(_make, _alone),
}
