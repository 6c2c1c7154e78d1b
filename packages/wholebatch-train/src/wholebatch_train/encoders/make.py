"""The encoders of a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..config import TrainConfig
from ..encoder_options import Named, SideConfig, TextSideConfig
from .dual import DualEncoder
from .encoder import Encoder, FixedEncoder
from .libraries import folder_of
from .small import ImageEncoder, TextEncoder
from .tune import tune

Kind = Literal["image", "text"]


def make_encoders(config: TrainConfig, kinds: Mapping[str, Kind]) -> dict[str, Encoder]:
    """Make the encoder of each side, in this order; sides of one kind share theirs, unless `--two-encoders`.

    Args:
        config: the configuration of the run.
        kinds: the kind of the items of each side, by the side's name.

    Raises:
        UserError: a model that is not on this machine, or options that do not fit it.
    """
    if config.two_encoders:
        return {side: make_encoder(config, kind) for side, kind in kinds.items()}
    encoders: dict[Kind, Encoder] = {}
    for kind in dict.fromkeys(kinds.values()):
        encoders[kind] = make_encoder(config, kind)
    return {side: encoders[kind] for side, kind in kinds.items()}


def make_encoder(config: TrainConfig, kind: Kind) -> Encoder:
    """Make the encoder of the items of one kind, as `--image-encoder` or `--text-encoder` says."""
    text = config.image_encoder if kind == "image" else config.text_encoder
    side: SideConfig = config.image if kind == "image" else config.text
    named, value = Named.parse(text), f"--{kind}-encoder {text}"
    if named.library == "small":
        small = _make_small(config, kind)
        small.learning_rate_factor = side.learning_rate_factor or 1.0
        if side.tune == "frozen":
            small.requires_grad_(False)
        return small
    if named.library == "timm":
        from .timm_image import TimmImage

        encoder: FixedEncoder = TimmImage(named.name, value, pretrained=side.pretrained)
    elif named.library == "transformers":
        encoder = _make_of_transformers(named.name, value, side)
    else:
        from .user_file import FileEncoder

        encoder = FileEncoder(Path(named.name), named.function, value, kind)
    tune(
        encoder, side, value, is_pretrained=side.pretrained and named.library != "file", is_file=named.library == "file"
    )
    return encoder


def _make_small(config: TrainConfig, kind: Kind) -> Encoder:
    if kind == "image":
        return ImageEncoder(config.model, config.image_channels or 1, config.image_size)
    return TextEncoder(config.model)


def _make_of_transformers(name: str, value: str, side: SideConfig) -> FixedEncoder:
    folder = folder_of(value, name)
    if isinstance(side, TextSideConfig):
        from .transformer import TransformerText

        return TransformerText(
            folder, value, pooling=side.pooling, max_tokens=side.max_tokens, pretrained=side.pretrained
        )
    from .transformer import TransformerImage

    return TransformerImage(folder, value, pooling=side.pooling, pretrained=side.pretrained)


def make_dual_encoder(config: TrainConfig, kinds: Mapping[str, Kind] | None = None) -> DualEncoder:
    """Make both encoders of a run with their scale; by default those of images and texts."""
    return DualEncoder(
        make_encoders(config, kinds or {"image": "image", "text": "text"}),
        embedding_size=config.model.embedding_size,
        initial_logit_scale=config.model.initial_logit_scale,
        bias=config.loss == "siglip",
    )
