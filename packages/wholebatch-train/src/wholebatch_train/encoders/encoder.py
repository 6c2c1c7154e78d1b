"""The interface of one side's network, whichever library it comes from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from .inputs import Inputs, rows_of

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
