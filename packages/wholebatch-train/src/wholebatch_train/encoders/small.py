"""The small encoders: the networks of this package, with sizes, preprocessing and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from wholebatch.app import require

from ..config import ModelConfig
from .encoder import Encoder
from .networks import ImageNetwork, TextNetwork
from .words import TextBatch, tokenize

FEWEST_WORDS = 12  # that an encoder reads where `max_words` is 0


@dataclass(frozen=True)
class Pad:
    """Fit pictures into a square and pad them with black: uint8, (b, channels, size, size)."""

    size: int
    channels: Literal[1, 3]

    @property
    def reads(self) -> tuple[int, int, int]:
        """The shape of pixels that need no preparation: (channels, size, size)."""
        return self.channels, self.size, self.size

    def __call__(self, pictures: Sequence[Any]) -> Tensor:
        """Map pictures of the mode of these channels to pixels."""
        import numpy as np
        from PIL import ImageOps

        square = (self.size, self.size)
        pixels = np.stack([np.asarray(ImageOps.pad(picture, square)) for picture in pictures])
        batch = torch.from_numpy(pixels)
        return batch.unsqueeze(1) if self.channels == 1 else batch.permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Words:
    """Split texts into words and their pieces."""

    max_words: int
    buckets: int

    def __call__(self, texts: Sequence[str]) -> TextBatch:
        """Map b texts to their tokens."""
        return tokenize(texts, max_words=self.max_words, buckets=self.buckets)


class ImageEncoder(ImageNetwork, Encoder):
    """The network of images at a size."""

    kind = "image"
    form = "small image"

    def __init__(self, config: ModelConfig, channels: Literal[1, 3], image_size: int) -> None:
        require(image_size, "image_size", "at least 8", image_size)
        super().__init__(
            channels=channels, image_size=image_size, width=config.image_width, embedding_size=config.embedding_size
        )
        self.config, self.channels, self.width = config, channels, config.embedding_size
        self.image_size = image_size
        self.prepare = Pad(image_size, channels)

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the sizes."""
        return {"sizes": asdict(self.config), "channels": self.channels, "image_size": self.image_size}


class TextEncoder(TextNetwork, Encoder):
    """The network of texts, with its tokens."""

    kind = "text"
    form = "small text 2"  # of other words than the first

    def __init__(self, config: ModelConfig) -> None:
        config = replace(config, max_words=config.max_words or FEWEST_WORDS)
        super().__init__(
            buckets=config.text_buckets, max_words=config.max_words, width=config.text_width,
            layers=config.text_layers, heads=config.text_heads, embedding_size=config.embedding_size,
        )  # fmt: skip
        self.config, self.width = config, config.embedding_size
        self.prepare = Words(config.max_words, config.text_buckets)

    def save(self, folder: Path) -> dict[str, Any]:
        """Return the sizes."""
        return {"sizes": asdict(self.config)}
