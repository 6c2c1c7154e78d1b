"""The inputs of the encoders, and the features of held-out pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import TrainConfig
from .data.pairs import Pairs
from .encoders.small import DualEncoder
from .encoders.words import TextBatch, tokenize


def as_float(images: Tensor, device: torch.device) -> Tensor:
    """Convert uint8 images to floats in [0, 1]."""
    return images.to(device).float() / 255


def tokens(config: TrainConfig, pairs: Pairs, rows: Tensor, device: torch.device) -> TextBatch:
    """Tokenize the texts with these indices."""
    batch = tokenize(
        [pairs.texts[i] for i in rows.tolist()], max_words=config.model.max_words, buckets=config.model.text_buckets
    )
    return TextBatch(*(x.to(device) for x in batch))


@torch.no_grad()
def held_out_features(
    encoder: DualEncoder, config: TrainConfig, pairs: Pairs, texts: Tensor, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return features of each text's first image and of the texts, on the CPU, without augmentation."""
    images, names = [], []
    for rows in texts.split(512):
        images.append(encoder.encode_images(as_float(pairs.images[pairs.first[rows]], device)).cpu())
        names.append(encoder.encode_texts(tokens(config, pairs, rows, device)).cpu())
    return torch.cat(images), torch.cat(names)
