"""The small encoders: a convolutional network for images; word vectors and an optional transformer for texts.

Nothing in them depends on another example (no batch norm) or on random numbers (no dropout), so the result for a row
does not depend on the split of the batch. Every parameter has an effect: the gradient of one without (a bias straight
before a normalization) would be rounding noise, which Adam turns into steps of full size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import ImageOps
from torch import Tensor, nn
from torch.nn import functional as F

from wholebatch.app import require

from ..config import ModelConfig
from .encoder import Encoder, Inputs, as_float
from .words import first_texts, tokenize


class ResidualBlock(nn.Module):
    """A residual block with one 3 x 3 convolution: x + conv(gelu(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, width, h, w) to the same shape."""
        return x + self.conv(F.gelu(self.norm(x)))


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
        square = (self.size, self.size)
        pixels = np.stack([np.asarray(ImageOps.pad(picture, square)) for picture in pictures])
        batch = torch.from_numpy(pixels)
        return batch.unsqueeze(1) if self.channels == 1 else batch.permute(0, 3, 1, 2).contiguous()


class ImageEncoder(Encoder):
    """A convolution of overlapping patches with stride 4, one with stride 2, and a projection of all positions."""

    kind = "image"
    form = "small image"

    def __init__(self, config: ModelConfig, channels: Literal[1, 3], image_size: int) -> None:
        require(image_size, "image_size", "at least 8", image_size)
        super().__init__()
        self.config, self.channels, self.image_size = config, channels, image_size
        self.width, self.prepare = config.embedding_size, Pad(image_size, channels)
        w = config.image_width
        self.body = nn.Sequential(
            nn.Conv2d(channels, w, 8, stride=4, padding=2),
            ResidualBlock(w),
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1),
            ResidualBlock(2 * w),
            nn.GroupNorm(8, 2 * w),
            nn.GELU(),
            nn.Flatten(),
        )
        self.project = nn.Linear(2 * w * (image_size // 8) ** 2, self.width, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map (b, channels, size, size), uint8 or float in [0, 1], to (b, width)."""
        # channels_last is the fastest layout of convolutions, on CPUs too
        rows: Tensor = self.project(self.body(as_float(images).contiguous(memory_format=torch.channels_last)))
        return rows

    def save(self, folder: Path) -> dict[str, Any]:
        return {"sizes": asdict(self.config), "channels": self.channels, "image_size": self.image_size}


class TransformerLayer(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # a bias of the keys would have no effect
        self.out = nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map (b, T, width) and a mask (b, T) to (b, T, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


FEWEST_WORDS = 12  # that an encoder reads where `max_words` is 0


class TextEncoder(Encoder):
    """Word vectors (means of piece vectors), positions, transformer layers, mean over the words."""

    kind = "text"
    form = "small text 2"  # of other words than the first

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = replace(config, max_words=config.max_words or FEWEST_WORDS)
        self.width, width = config.embedding_size, config.text_width
        self.prepare = partial(tokenize, max_words=config.max_words, buckets=config.text_buckets)
        self.pieces = nn.EmbeddingBag(config.text_buckets, width, mode="mean")
        nn.init.normal_(self.pieces.weight, std=0.05)  # small, so that training soon outgrows the hash's noise
        self.positions = nn.Parameter(0.02 * torch.randn(config.max_words, width))
        self.layers = nn.ModuleList(TransformerLayer(width, config.text_heads) for _ in range(config.text_layers))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, self.width, bias=False)

    def forward(self, texts: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """Map b texts, as `tokenize` returns them, to (b, width)."""
        words, pieces, offsets = texts
        vectors = torch.cat([self.positions.new_zeros(1, self.positions.shape[1]), self.pieces(pieces, offsets)])
        mask = words > 0
        x = F.embedding(words, vectors) + self.positions
        for layer in self.layers:
            x = layer(x, mask)
        x = (self.norm(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        rows: Tensor = self.project(x)
        return rows

    def first(self, inputs: Inputs, count: int) -> Inputs:
        """Return the first so many texts with their words alone."""
        return first_texts(inputs, count)

    def save(self, folder: Path) -> dict[str, Any]:
        return {"sizes": asdict(self.config)}
