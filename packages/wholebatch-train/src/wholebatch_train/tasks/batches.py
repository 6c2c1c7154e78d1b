"""A rank's part of each step's batch, which worker processes prepare without a model, and its augmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from wholebatch.app import UserError

from ..config import TrainConfig
from ..data.classes import LabeledImages
from ..data.from_table import FalseNegatives
from ..data.pairs import Order, Pairs, batch_of_step
from ..data.randomness import seeded
from ..data.sides import DrawnPictures, Side
from ..encoders.encoder import Encoder, Inputs, Prepare, as_float


@dataclass(frozen=True)
class Reader:
    """How one side's rows become the inputs of its encoder; it runs in a worker."""

    prepare: Prepare
    channels: int

    @classmethod
    def of(cls, encoder: Encoder) -> Reader:
        return cls(encoder.prepare, encoder.channels)

    def __call__(self, side: Side, rows: Tensor) -> Inputs:
        if isinstance(side, DrawnPictures) and getattr(self.prepare, "reads", None) == tuple(side.pixels.shape[1:]):
            return side.pixels[rows]  # as the built-in encoder reads them at this size
        items = side.items(rows)
        if side.kind == "image":
            mode = "L" if self.channels == 1 else "RGB"
            items = [picture if picture.mode == mode else picture.convert(mode) for picture in items]
        return self.prepare(items)


def rows_of_chunks(rows: slice, config: TrainConfig, size: int) -> list[slice]:
    """Return the places of each chunk's rows among a rank's rows: as many chunks on every rank.

    Engines whose passes are collective, such as FSDP2, need as many. A chunk has at most `config.chunk_size` rows.
    Where a rank has fewer rows than another has chunks of one row, the other has a chunk of two.

    >>> config = TrainConfig(batch_size=9, chunk_size=4)
    >>> [each.stop for each in rows_of_chunks(slice(0, 5), config, 2)]
    [2, 5]
    >>> [each.stop for each in rows_of_chunks(slice(5, 9), config, 2)]
    [2, 4]
    """
    fewest, most = config.batch_size // size, -(-config.batch_size // size)
    count = max(1, min(-(-most // config.chunk_size), fewest)) if config.chunk_size else 1
    edges = [(rows.stop - rows.start) * place // count for place in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


class Chunk(NamedTuple):
    """Rows that are encoded together."""

    first: Inputs
    second: Inputs
    negatives: Inputs | None
    """Of all these rows; None if they have none."""
    rows: slice
    """Their places among the rank's rows."""


@dataclass(frozen=True)
class PairBatch:
    """A rank's rows of the global batch of pairs; no tuple, in which gradient caching would look for the rows."""

    step: int
    chunks: list[Chunk]
    names: Tensor
    """int64, (b,): the group of each row."""
    negative_names: Tensor
    """int64, (number of negatives,): the group of the query in the batch that has it as a stated positive, or -1."""


class PairBatches:
    """The rank's part of the pairs of each step."""

    def __init__(
        self,
        pairs: Pairs,
        train: Tensor,
        readers: Mapping[str, Reader],
        config: TrainConfig,
        rows: slice,
        chunks: Sequence[slice],
    ) -> None:
        self._pairs, self._readers, self._rows, self._seed = pairs, readers, rows, config.seed
        self._order = Order(train, batch_size=config.batch_size, seed=config.seed)
        self._chunks = chunks
        self._false_negatives = None
        if pairs.negatives is not None:
            queries, documents = (pairs.numbers[name] for name in pairs.names)
            self._false_negatives = FalseNegatives(queries, documents, pairs.group_of, pairs.ids)

    def __call__(self, step: int) -> PairBatch:
        all_rows, all_groups = batch_of_step(self._order, self._pairs, step=step, seed=self._seed)
        rows, groups = all_rows[self._rows], all_groups[self._rows]
        chunks, numbers = [], [torch.empty(0, dtype=torch.int64)]
        for places in self._chunks:
            some = rows[places]
            first, second = (self._readers[name](side, some) for name, side in self._pairs.sides.items())
            negatives = None
            if self._pairs.negatives is not None:
                texts, text_numbers = self._pairs.negatives.of(some)
                numbers.append(text_numbers)
                negatives = self._readers[self._pairs.names[1]].prepare(texts) if texts else None
            chunks.append(Chunk(first, second, negatives, places))
        negative_names = torch.cat(numbers)
        if self._false_negatives is not None:
            negative_names = self._false_negatives.ids(negative_names, all_rows, all_groups)
        return PairBatch(step, chunks, groups, negative_names)


class ImageBatch(NamedTuple):
    """A rank's rows of the global batch of labeled images."""

    images: Inputs
    labels: Tensor


class ImageBatches:
    """The rank's part of the labeled images of each step."""

    def __init__(self, data: LabeledImages, reader: Reader, config: TrainConfig, rows: slice) -> None:
        self._data, self._reader, self._rows = data, reader, rows
        self._order = Order(data.train, batch_size=config.batch_size, seed=config.seed)

    def __call__(self, step: int) -> ImageBatch:
        rows = self._order.batch(step)[self._rows]
        return ImageBatch(self._reader(self._data.pictures, rows), self._data.labels[rows])


def affine_maps(batch_size: int, *, strength: float, step: int, seed: int) -> Tensor:
    """Return a small rotation, stretch and shift for every row of the global batch, (batch_size, 2, 3)."""
    angle, stretch_x, stretch_y, shift_x, shift_y = (
        0.06 * strength * (2 * torch.rand(5, batch_size, generator=seeded(seed, "augment", step)) - 1)
    )
    cos, sin = angle.cos(), angle.sin()
    first = torch.stack([cos * (1 + stretch_x), -sin * (1 + stretch_y), shift_x], dim=1)
    second = torch.stack([sin * (1 + stretch_x), cos * (1 + stretch_y), shift_y], dim=1)
    return torch.stack([first, second], dim=1)


def apply_maps(images: Tensor, maps: Tensor) -> Tensor:
    """Apply maps (b, 2, 3) to images (b, c, h, w) in [0, 1]; pixels from outside are 0."""
    grid = F.affine_grid(maps, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def augmented(images: Inputs, config: TrainConfig, rows: slice, step: int) -> Inputs:
    """Apply the configured augmentation to these rows of the step's global batch, pixels (b, channels, h, w)."""
    if not config.augment:
        return images
    if not (isinstance(images, Tensor) and images.dim() == 4):
        raise UserError(
            f"--augment must be 0 with --image-encoder {config.image_encoder}, which reads other inputs than pixels "
            f"(b, channels, h, w), got {config.augment}"
        )
    images = as_float(images)
    maps = affine_maps(config.batch_size, strength=config.augment, step=step, seed=config.seed)
    return apply_maps(images, maps[rows].to(images.device))
