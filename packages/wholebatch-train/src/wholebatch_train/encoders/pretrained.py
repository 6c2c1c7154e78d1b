"""The common part of all encoders of libraries and of users: no dropout, and no statistics of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from wholebatch.app import UserError
from wholebatch.app.tensors import leaves_of

from .encoder import Encoder
from .networks import as_float


class FixedEncoder(Encoder):
    """An encoder whose layers stay in evaluation mode while its weights are trained.

    So a row depends on its item alone: not on random numbers (dropout, stochastic depth) and not on the rest of the
    batch (batch norm, which uses its stored statistics). The numbers are the same for any split of the batch.
    """

    model: Any
    """The network of the library, or of the user."""

    def train(self, mode: bool = True) -> FixedEncoder:
        """Keep evaluation mode; only modules that recompute activations are told that they are trained.

        Such a module may drop out by a function, with a rate of its own: that becomes 0.
        """
        super().train(False)
        for module in self.modules():
            if getattr(module, "gradient_checkpointing", False) is True:
                for name in [name for name, value in vars(module).items() if "drop" in name and type(value) is float]:
                    setattr(module, name, 0.0)
                module.training = mode
        return self


def check_batch_norm(encoder: nn.Module, value: str, *, pretrained: bool) -> str:
    """Return a line about batch norm with stored statistics, or "" if the encoder has none.

    Raises:
        UserError: the statistics are those of random weights: they normalize nothing.
    """
    norms = [m for m in encoder.modules() if isinstance(m, _NormBase) and "Instance" not in type(m).__name__]
    if not norms:
        return ""
    if not pretrained:
        raise UserError(
            f"{value} has batch norm ({len(norms)} layers), whose statistics would depend on the split of the batch. "
            "So they stay as they are stored, and random weights have none: take pretrained weights, or a model with "
            "group or layer norm"
        )
    return f"batch norm uses its stored statistics in training, too ({len(norms)} layers)"


def used_parameters(output: Tensor) -> set[int]:
    """Return the ids of the parameters that an output depends on, by its graph."""
    return {id(x) for x in leaves_of([output])}


class Normalized(nn.Module):
    """Pixels as a model of pictures reads them: (x - mean) / std of each channel, x in [0, 1]."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Any, std: Any) -> None:
        super().__init__()
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map uint8 or float pixels in [0, 1], (b, channels, h, w), to floats."""
        return (as_float(images) - self.mean) / self.std
