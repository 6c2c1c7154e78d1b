"""The interface of one side's network, and its inputs.

Encoders of libraries and of users have no dropout, and no statistics of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from wholebatch.app import UserError
from wholebatch.app.tensors import leaves_of

from ..config import Kind

Inputs = Any
"""A tensor, a named tuple of tensors or a dictionary of tensors: it crosses processes, and goes to a device whole."""
Prepare = Callable[[Sequence[Any]], Inputs]


def as_float(images: Tensor) -> Tensor:
    """Convert uint8 images to floats in [0, 1]; floats stay."""
    return images.float() / 255 if images.dtype == torch.uint8 else images


def map_tensors(act: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Return inputs of the same form with `act` applied to each tensor."""
    if isinstance(inputs, Tensor):
        return act(inputs)
    if isinstance(inputs, Mapping):
        return {name: act(x) for name, x in inputs.items()}
    return type(inputs)(*(act(x) for x in inputs))


def to_device(inputs: Inputs, device: torch.device) -> Inputs:
    """Move every tensor to the device; from pinned memory the host does not wait."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), inputs)


def number_of_rows(inputs: Inputs) -> int:
    """Return the number of items that the inputs were prepared from."""
    if isinstance(inputs, Tensor):
        return len(inputs)
    return len(next(iter(inputs.values() if isinstance(inputs, Mapping) else inputs)))


def rows_of(inputs: Inputs, rows: slice) -> Inputs:
    """Return these rows of every tensor."""
    return map_tensors(lambda x: x[rows], inputs)


class Encoder(nn.Module):
    """One side's network: `forward(inputs)` maps the inputs of b items to (b, width).

    An item is a picture (of Pillow: upright, opaque, eight bits, mode "L" for one channel and "RGB" for three) or a
    string. `prepare` turns items into inputs in the processes that load the data; it is small, picklable and has no
    parameters. A row of the result depends on its item alone.
    """

    kind: Kind
    """The items that it reads."""
    width: int
    """Columns of its result."""
    channels: Literal[1, 3] = 3
    """Channels of the pictures that it reads; of no meaning for texts."""
    prepare: Prepare
    """A list of b items -> their inputs, on the CPU."""
    form: ClassVar[str]
    """The name under which `save` and `open_encoder` know this class."""
    notes: Sequence[str] = ()
    """Lines to show at the start of a run."""
    learning_rate_factor: float = 1.0
    """Factor of the run's learning rate for its weights."""

    # The interface of a DualEncoder: an encoder alone is a model of one side.
    @property
    def sides(self) -> tuple[str, ...]:
        return (self.kind,)

    @property
    def embedding_size(self) -> int:
        return self.width

    def encoder(self, _: str) -> Encoder:
        return self

    def encode(self, _: str, inputs: Inputs) -> Tensor:
        """Map the inputs of b items to unit rows (b, width)."""
        return F.normalize(self(inputs), dim=-1)

    def example(self) -> Any:
        """Return an item that it reads: a picture of noise, or a text."""
        if self.kind == "text":
            return "an example"
        pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert("L" if self.channels == 1 else "RGB")

    def first(self, inputs: Inputs, count: int) -> Inputs:
        """Return the inputs of the first so many items, padded as they are."""
        return rows_of(inputs, slice(0, count))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the files that its class needs to build it again into `folder`, and return the values beside."""
        raise NotImplementedError


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
    """Return a line about batch norm with stored statistics, or ""; UserError if they are those of random weights."""
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
