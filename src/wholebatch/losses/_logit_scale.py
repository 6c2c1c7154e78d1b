"""Logit scale and logit bias of a loss module: defaults that its constructor takes, and that a call overrides.

    class SigLIPLoss(TakesLogitBias, KernelLoss): ...

A default is a number, a tensor, which becomes a buffer, an `nn.Parameter`, or a :class:`wholebatch.Scale`. The last two
belong to the module and are trained with it. `forward` gives both arguments the default None, and calls the loss's
function with `_settings_of_call`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import Tensor, nn

from .._base.checks import check_instance, check_scalar
from ..comm.binding import missing_error
from ..contract import raise_on_all_ranks
from ..scale import Scale
from ._module import LossModule

Scalar = Tensor | float | Scale | None
_ACCEPTED = "a number, a tensor of shape () or [1], an nn.Parameter, or a wb.Scale"


class TakesLogitScale(LossModule):
    """The settings of a loss whose logit scale is given by the constructor or by the call."""

    logit_scale: Scalar = None

    def check(self) -> None:
        """Raise ValueError unless the settings are valid."""
        super().check()
        for name in ("logit_scale", "logit_bias"):
            _check_default(name, self.settings.get(name))

    def _settings_of_call(self, *, optional: Sequence[str] = (), **arguments: Any) -> dict[str, Any]:
        """Return the settings and the arguments of a call, with the constructor's defaults where a call gives None.

        Raises:
            TypeError: on all ranks, if a required argument is given by neither.
        """
        settings = self.settings
        defaults = {name: settings.get(name) for name, value in arguments.items() if value is None}
        missing = [name for name, value in defaults.items() if value is None and name not in optional]
        if missing:
            self._refuse(missing)
        called = {name: value() if isinstance(value, Scale) else value for name, value in defaults.items()}
        return {**settings, **arguments, **called}

    def _refuse(self, missing: Sequence[str]) -> NoReturn:
        """Raise for arguments that neither the call nor the constructor gives, on all ranks."""
        name = type(self).forward.__qualname__
        constructor, defaults = name.rpartition(".")[0], [f"{key}=..." for key in missing if key in self._declared]
        fix = f"pass {'it' if len(missing) == 1 else 'them'} in the call"
        if defaults:
            fix += f", or to the constructor: {constructor}({', '.join(defaults)})"
        error = missing_error(type(self).forward, missing, fix)
        raise_on_all_ranks(name, error, self.group)
        raise error


class TakesLogitBias(TakesLogitScale):
    """The settings of a loss whose logit scale and logit bias are given by the constructor or by the call."""

    logit_bias: Scalar = None


def _check_default(name: str, value: object) -> None:
    """Raise ValueError unless the value may stand in for an argument of every call."""
    if value is None or isinstance(value, Scale):
        return
    if isinstance(value, nn.Module):
        check_instance(name, value, Scale, _ACCEPTED)
    if isinstance(value, Tensor) and value.grad_fn is not None:
        raise ValueError(
            f"{name} must be {_ACCEPTED} in the constructor, got a computed tensor with a graph, which lasts for one "
            "backward pass; pass it in each call"
        )
    check_scalar(name, value)
