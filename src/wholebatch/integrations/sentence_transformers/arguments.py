"""Checks of arguments that several losses share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import wholebatch as wb

from ...comm import Group
from .._numbers import checked_positive


def checked_scale(scale: Any) -> Any:
    """Return a positive number or a `wb.Scale`.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(scale, wb.Scale):
        return scale
    return checked_positive("scale", scale, fix="; to train it pass wb.Scale(20.0)")


def scale_value(scale: float | wb.Scale) -> Tensor | float:
    """Return the present value of a scale, with a graph if it is trained."""
    return scale() if isinstance(scale, wb.Scale) else scale


def scale_number(scale: float | wb.Scale) -> float:
    """Return the present value of a scale."""
    return float(scale().detach()) if isinstance(scale, wb.Scale) else float(scale)


def checked_choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return one of the choices.

    Raises:
        ValueError: if it is none of them.
    """
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    return value


def group_of_batch(gather_across_devices: bool, group: Group, scale: float | wb.Scale = 1.0) -> Group:
    """Return the processes whose rows are compared.

    Raises:
        ValueError: for a trained scale that the processes would train apart.
    """
    if gather_across_devices:
        return group
    if isinstance(scale, wb.Scale) and wb.comm.select_communicator(None).size > 1:
        raise ValueError(
            "scale must be a number with gather_across_devices=False on several processes, got a wb.Scale: it belongs "
            "to the loss, which no engine synchronizes, so each process would train another one; leave "
            "gather_across_devices at True"
        )
    return wb.comm.LocalCommunicator()
