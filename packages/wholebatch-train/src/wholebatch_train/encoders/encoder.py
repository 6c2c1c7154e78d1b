"""The interface of one side's network, whichever library it comes from, and its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

Inputs = Any
"""A tensor, a named tuple of tensors or a dictionary of tensors: it crosses processes, and goes to a device whole."""


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


Prepare = Callable[[Sequence[Any]], Inputs]


class Encoder(nn.Module):
    """One side's network: `forward(inputs)` maps the inputs of b items to (b, width).

    An item is a picture (of Pillow: upright, opaque, eight bits, mode "L" for one channel and "RGB" for three) or a
    string. `prepare` turns items into inputs in the processes that load the data; it is small, picklable and has no
    parameters. A row of the result depends on its item alone.
    """

    kind: Literal["image", "text"]
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

    def example(self) -> Any:
        """Return an item that it reads: a picture of noise, or a text."""
        if self.kind == "text":
            return "an example"
        import numpy as np
        from PIL import Image

        pixels = np.random.default_rng(0).integers(0, 256, (40, 56, 3), dtype=np.uint8)
        return Image.fromarray(pixels).convert("L" if self.channels == 1 else "RGB")

    def first(self, inputs: Inputs, count: int) -> Inputs:
        """Return the inputs of the first so many items, padded as they are."""
        return rows_of(inputs, slice(0, count))

    def save(self, folder: Path) -> dict[str, Any]:
        """Write the files that building this encoder again needs into `folder`, without the weights.

        Returns:
            The values of JSON that its class needs to be built, beside the files.
        """
        raise NotImplementedError
