"""A small dual encoder: a convolutional network for images; word vectors, and a transformer if wanted, for texts.

Nothing in it looks at another example (no batch norm) or at random numbers (no dropout), so what a rank computes for
a row does not depend on how the batch is split. No parameter is without effect (a bias straight before a
normalization): its gradient would be rounding noise, which Adam turns into steps of full size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .text import TextBatch


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the two encoders."""

    feature_size: int = 256
    """Length of an image's or a text's feature vector."""
    image_width: int = 64
    """Channels after the first convolution, at a quarter of the resolution; doubled at an eighth."""
    text_width: int = 128
    """Length of a word vector."""
    text_layers: int = 0
    """Transformer layers over the words; 0: their mean alone, which learns names of characters fastest."""
    text_heads: int = 4
    """Attention heads per layer; divides text_width."""
    text_buckets: int = 16384
    """Rows of the table of hashed word pieces."""
    max_words: int = 12
    """Words of a text that are read; the rest is cut off."""
    initial_logit_scale: float = 14.3
    """Scale of the similarities before the first step (1 / temperature)."""


class ResidualBlock(nn.Module):
    """x + conv(gelu(norm(x))): one 3 x 3 convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, h, w) -> the same."""
        return x + self.conv(F.gelu(self.norm(x)))


class ImageEncoder(nn.Module):
    """Overlapping 8 x 8 patches at a quarter of the resolution, an eighth, and a projection of all that is left."""

    def __init__(self, config: ModelConfig, channels: int, image_size: int) -> None:
        super().__init__()
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
        self.project = nn.Linear(2 * w * (image_size // 8) ** 2, config.feature_size, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(b, channels, size, size), float in [0, 1] -> (b, feature_size)."""
        # channels_last is the layout in which convolutions are fastest, on CPUs too
        return self.project(self.body(images.contiguous(memory_format=torch.channels_last)))


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
        """(b, T, width), (b, T) bool -> (b, T, width)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.feed(self.norm2(x))


class TextEncoder(nn.Module):
    """Word vectors (means of piece vectors), positions, transformer layers, mean over the words."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pieces = nn.EmbeddingBag(config.text_buckets, config.text_width, mode="mean")
        nn.init.normal_(self.pieces.weight, std=0.05)  # small, so that training soon outgrows the hash's noise
        self.positions = nn.Parameter(0.02 * torch.randn(config.max_words, config.text_width))
        self.layers = nn.ModuleList(
            TransformerLayer(config.text_width, config.text_heads) for _ in range(config.text_layers)
        )
        self.norm = nn.LayerNorm(config.text_width)
        self.project = nn.Linear(config.text_width, config.feature_size, bias=False)

    def forward(self, words: Tensor, pieces: Tensor, offsets: Tensor) -> Tensor:
        """A `TextBatch` of b texts -> (b, feature_size)."""
        vectors = torch.cat([self.positions.new_zeros(1, self.positions.shape[1]), self.pieces(pieces, offsets)])
        mask = words > 0
        x = F.embedding(words, vectors) + self.positions
        for layer in self.layers:
            x = layer(x, mask)
        x = (self.norm(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.project(x)


class DualEncoder(nn.Module):
    """Both encoders, the learnable scale and perhaps a bias, in one module for the engine to wrap."""

    max_logit_scale = 100.0

    def __init__(self, config: ModelConfig, *, channels: int, image_size: int, bias: bool = False) -> None:
        super().__init__()
        self.image, self.text = ImageEncoder(config, channels, image_size), TextEncoder(config)
        self.log_logit_scale = nn.Parameter(torch.tensor(config.initial_logit_scale).log())
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if bias else None

    def forward(self, images: Tensor, texts: TextBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Images and texts -> unit features (b, d), (b, d), the scale, and the bias if there is one."""
        return self.encode_images(images), self.encode_texts(texts), self.logit_scale, self.logit_bias

    def encode_images(self, images: Tensor) -> Tensor:
        """(b, channels, size, size), float in [0, 1] -> (b, d), unit rows."""
        return F.normalize(self.image(images), dim=-1)

    def encode_texts(self, texts: TextBatch) -> Tensor:
        """b texts -> (b, d), unit rows."""
        return F.normalize(self.text(*texts), dim=-1)

    @property
    def logit_scale(self) -> Tensor:
        """exp of the parameter."""
        return self.log_logit_scale.exp()

    @torch.no_grad()
    def limit_logit_scale(self) -> None:
        """After a step: at most `max_logit_scale`; a clamp in the forward pass would end its gradient for good."""
        self.log_logit_scale.clamp_(max=math.log(self.max_logit_scale))
