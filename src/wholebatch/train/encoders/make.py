"""The encoders of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ..config import TrainConfig
from .dual import DualEncoder
from .encoder import Encoder
from .small import ImageEncoder, TextEncoder

Kind = Literal["image", "text"]


def make_encoders(config: TrainConfig, kinds: Mapping[str, Kind]) -> dict[str, Encoder]:
    """Make the encoder of each side, in this order; sides of one kind share theirs.

    Args:
        config: the configuration of the run.
        kinds: the kind of the items of each side, by the side's name.
    """
    made: dict[Kind, Encoder] = {}
    for kind in dict.fromkeys(kinds.values()):
        made[kind] = make_encoder(config, kind)
    return {side: made[kind] for side, kind in kinds.items()}


def make_encoder(config: TrainConfig, kind: Kind) -> Encoder:
    """Make the encoder of the items of one kind, as `--image-encoder` or `--text-encoder` says."""
    if kind == "image":
        return ImageEncoder(config.model, config.image_channels or 1, config.image_size)
    return TextEncoder(config.model)


def make_dual_encoder(config: TrainConfig, kinds: Mapping[str, Kind] | None = None) -> DualEncoder:
    """Make both encoders of a run with their scale; by default those of images and texts."""
    return DualEncoder(
        make_encoders(config, kinds or {"image": "image", "text": "text"}),
        embedding_size=config.model.embedding_size,
        initial_logit_scale=config.model.initial_logit_scale,
        bias=config.loss == "siglip",
    )
