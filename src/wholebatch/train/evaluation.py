"""The inputs of the encoders, and the features of held-out pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from .data.pairs import Pairs
from .encoders.dual import DualEncoder
from .encoders.encoder import Encoder
from .encoders.inputs import Inputs, to_device
from .encoders.small import Pad


def image_inputs(encoder: Encoder, images: Tensor) -> Inputs:
    """Prepare uint8 images, (b, channels, size, size); what fits the encoder already is left as it is."""
    prepare = encoder.prepare
    if isinstance(prepare, Pad) and prepare.channels == images.shape[1] and prepare.size == images.shape[2]:
        return images
    from PIL import Image

    mode = "L" if encoder.channels == 1 else "RGB"
    pixels = images[:, 0].numpy() if images.shape[1] == 1 else images.permute(0, 2, 3, 1).numpy()
    return prepare([Image.fromarray(picture).convert(mode) for picture in pixels])


def text_inputs(encoder: Encoder, pairs: Pairs, rows: Tensor) -> Inputs:
    """Prepare the texts with these indices."""
    return encoder.prepare([pairs.texts[i] for i in rows.tolist()])


@torch.no_grad()
def held_out_features(encoder: DualEncoder, pairs: Pairs, texts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return features of each text's first image and of the texts, on the CPU, without augmentation."""
    images, names = [], []
    for rows in texts.split(512):
        pictures = image_inputs(encoder.encoder("image"), pairs.images[pairs.first[rows]])
        words = text_inputs(encoder.encoder("text"), pairs, rows)
        images.append(encoder.encode("image", to_device(pictures, device)).cpu())
        names.append(encoder.encode("text", to_device(words, device)).cpu())
    return torch.cat(images), torch.cat(names)
