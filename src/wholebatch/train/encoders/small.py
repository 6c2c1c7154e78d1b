"""A small dual encoder: a convolutional network for images; word vectors and an optional transformer for texts.

Nothing in it depends on another example (no batch norm) or on random numbers (no dropout), so the result for a row
does not depend on the split of the batch. Every parameter has an effect: the gradient of one without (a bias straight
before a normalization) would be rounding noise, which Adam turns into steps of full size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import ModelConfig
from .words import TextBatch


class ResidualBlock(nn.Module):
    """A residual block with one 3 x 3 convolution: x + conv(gelu(norm(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Map (b, width, h, w) to the same shape."""
        return x + self.conv(F.gelu(self.norm(x)))


class ImageEncoder(nn.Module):
    """A convolution of overlapping patches with stride 4, one with stride 2, and a projection of all positions."""

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
        self.project = nn.Linear(2 * w * (image_size // 8) ** 2, config.embedding_size, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map (b, channels, size, size), float in [0, 1], to (b, embedding_size)."""
        # channels_last is the fastest layout of convolutions, on CPUs too
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
        """Map (b, T, width) and a mask (b, T) to (b, T, width)."""
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
        self.project = nn.Linear(config.text_width, config.embedding_size, bias=False)

    def forward(self, words: Tensor, pieces: Tensor, offsets: Tensor) -> Tensor:
        """Map the fields of a `TextBatch` of b texts to (b, embedding_size)."""
        vectors = torch.cat([self.positions.new_zeros(1, self.positions.shape[1]), self.pieces(pieces, offsets)])
        mask = words > 0
        x = F.embedding(words, vectors) + self.positions
        for layer in self.layers:
            x = layer(x, mask)
        x = (self.norm(x) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return self.project(x)


class DualEncoder(nn.Module):
    """Both encoders, the learnable scale and an optional bias, in one module for an engine such as DDP to wrap."""

    max_logit_scale = 100.0

    def __init__(self, config: ModelConfig, *, channels: int, image_size: int, bias: bool = False) -> None:
        super().__init__()
        self.image, self.text = ImageEncoder(config, channels, image_size), TextEncoder(config)
        self.log_logit_scale = nn.Parameter(torch.tensor(config.initial_logit_scale).log())
        self.logit_bias = nn.Parameter(torch.tensor(-10.0)) if bias else None

    def forward(self, images: Tensor, texts: TextBatch) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return unit features of images and texts, (b, d) each, the scale, and the bias if there is one."""
        return self.encode_images(images), self.encode_texts(texts), self.logit_scale, self.logit_bias

    def encode_images(self, images: Tensor) -> Tensor:
        """Map images (b, channels, size, size), float in [0, 1], to unit rows (b, d)."""
        return F.normalize(self.image(images), dim=-1)

    def encode_texts(self, texts: TextBatch) -> Tensor:
        """Map b texts to unit rows (b, d)."""
        return F.normalize(self.text(*texts), dim=-1)

    @property
    def logit_scale(self) -> Tensor:
        """The scale of similarities: exp of the parameter."""
        return self.log_logit_scale.exp()

    @torch.no_grad()
    def limit_logit_scale(self) -> None:
        """Clamp the scale to `max_logit_scale` after a step; a clamped forward pass would end its gradient for good."""
        self.log_logit_scale.clamp_(max=math.log(self.max_logit_scale))
