"""Images with class labels and their split, wherever the images lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..pictures.left_out import LeftOut
from ..sides import Side


@dataclass(frozen=True)
class LabeledImages:
    """Images, the class of each, and their split."""

    pictures: Side
    labels: Tensor
    """int64, (n,): indices of `names`."""
    names: tuple[str, ...]
    """Names of the classes."""
    train: Tensor
    """Indices of images; so are the next two."""
    validation: Tensor
    test: Tensor
    novelty: str = "images never seen"
    """How the test set differs from the training set, in words."""
    digest: str = ""
    """A hash of the data, equal on ranks that see the same."""
    numbers: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64, (n,): equal for equal images."""
    left_out: tuple[LeftOut, ...] = ()
    """The rows that `--skip-bad` has left out."""

    def __len__(self) -> int:
        """Number of classes."""
        return len(self.names)

    def picture(self, row: Tensor) -> Any:
        """Return the picture of a row."""
        return self.pictures.items(row[None])[0]

    def example(self, label: int) -> Tensor:
        """Return the row of a class's first image in training, ()."""
        return self.train[self.labels[self.train] == label][0]
