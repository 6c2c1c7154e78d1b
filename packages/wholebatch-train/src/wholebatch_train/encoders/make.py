"""The encoders of a configuration, and encoders in a folder: what a later program needs to build them again.

encoders.json        the names of the sides, the folder of each side's encoder, and the sizes of what joins them
NAME/encoder.json    the class of an encoder and its values
NAME/...             the model's configuration, and the files of its tokenizer or image processor; or the user's file

The weights are in the run's model.safetensors.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from wholebatch.app import UserError, open_regular, parse_json, read_bounded, shown

from ..config import Kind, ModelConfig, Named, SideConfig, TextSideConfig, TrainConfig
from ..config_file import options_of
from .dual import DualEncoder
from .encoder import Encoder, FixedEncoder
from .libraries import folder_of
from .small import ImageEncoder, TextEncoder
from .timm_image import TimmImage
from .transformer import TransformerImage, TransformerText
from .tune import tune
from .user_file import COPY, FileEncoder


def make_encoder(config: TrainConfig, kind: Kind) -> Encoder:
    """Make the encoder of the items of one kind, as `--image-encoder` or `--text-encoder` says."""
    text = config.image_encoder if kind == "image" else config.text_encoder
    side: SideConfig = config.image if kind == "image" else config.text
    named, value = Named.parse(text), f"--{kind}-encoder {text}"
    if named.library == "small":
        channels = config.image_channels or 1
        is_image = kind == "image"
        small = ImageEncoder(config.model, channels, config.image_size) if is_image else TextEncoder(config.model)
        small.learning_rate_factor = side.learning_rate_factor or 1.0
        if side.tune == "frozen":
            small.requires_grad_(False)
        return small
    is_file = named.library == "file"
    if named.library == "timm":
        encoder: FixedEncoder = TimmImage(named.name, value, pretrained=side.pretrained)
    elif is_file:
        encoder = FileEncoder(Path(named.name), named.function, value, kind)
    elif isinstance(side, TextSideConfig):
        encoder = TransformerText(
            folder_of(value, named.name), value,
            pooling=side.pooling, max_tokens=side.max_tokens, pretrained=side.pretrained,
        )  # fmt: skip
    else:
        folder = folder_of(value, named.name)
        encoder = TransformerImage(folder, value, pooling=side.pooling, pretrained=side.pretrained)
    tune(encoder, side, value, is_pretrained=side.pretrained and not is_file, is_file=is_file)
    return encoder


def make_dual_encoder(config: TrainConfig, kinds: Mapping[str, Kind] | None = None) -> DualEncoder:
    """Make both encoders of a run with their scale; by default those of images and texts.

    They are made in the order of the sides. Sides of one kind share theirs, unless `--two-encoders`.
    """
    encoders: dict[str, Encoder] = {}
    kind_of_side = kinds or {"image": "image", "text": "text"}
    for side, kind in kind_of_side.items():
        twins = [] if config.two_encoders else [each for each in encoders.values() if each.kind == kind]
        encoders[side] = twins[0] if twins else make_encoder(config, kind)
    return DualEncoder(
        encoders,
        embedding_size=config.model.embedding_size,
        initial_logit_scale=config.model.initial_logit_scale,
        bias=config.loss == "siglip",
    )


FOLDER = "encoders"
_ONE, _BOTH = "encoder.json", "encoders.json"
_FORMAT = "wholebatch-encoder-1"
_MOST_BYTES = 2**20
SIDES = ("image", "text", "query", "document")


def save_encoder(folder: Path, encoder: Encoder) -> None:
    """Write what `open_encoder` needs into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / _ONE, {"form": encoder.form, **encoder.save(folder)})


def open_encoder(folder: Path | str, *, trust: bool = False) -> Encoder:
    """Build the encoder that `save_encoder` has written, with random weights.

    Args:
        folder: of the encoder.
        trust: whether to execute the copy of a user's file, if that makes the encoder.

    Raises:
        UserError: the folder holds no encoder of this version, or one that is not trusted, or a library that it needs
            is missing.
    """
    folder = Path(folder)
    path = folder / _ONE
    values = _read(path)
    try:
        encoder = _build(folder, values.pop("form", None), values, trust=trust)
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is not an encoder of this version: {error}") from error
    encoder.eval()
    return encoder


def _build(folder: Path, form: Any, values: dict[str, Any], *, trust: bool) -> Encoder:
    value, source = str(folder), folder / _ONE
    if form == ImageEncoder.form:
        pictures = {"image_channels": values["channels"], "image_size": values["image_size"]}
        options = options_of(source, model=values["sizes"], data="", **pictures)
        return ImageEncoder(options.model, options.image_channels or 1, options.image_size)
    if form == TextEncoder.form:
        return TextEncoder(options_of(source, model=values["sizes"]).model)
    if form == "timm image":
        return TimmImage(values["model"], value, pretrained=False, saved=values)
    if form == "transformers text":
        text = TransformerText(
            folder, value, pooling=values["rule"] or "auto", max_tokens=values["max_tokens"], pretrained=False
        )
        text.prepare = replace(text.prepare, lower=values["lower"])
        return text
    if form == "transformers image":
        return TransformerImage(folder, value, pooling=values["rule"], pretrained=False)
    if form == "file":
        if not trust:
            raise UserError(
                f"{folder / _ONE}: this encoder is made by Python code, {str(folder / COPY)!r}; read it, and pass "
                "--trust, or trust=True, to execute it"
            )
        return FileEncoder(folder / COPY, values["function"], value, values["kind"])
    raise TypeError(f"its form is {form!r}")


def save_encoders(folder: Path, model: DualEncoder | Encoder) -> None:
    """Write what `open_dual_encoder` needs into `folder`, which is made; an encoder alone gets a folder in it."""
    if isinstance(model, Encoder):
        save_encoder(folder / model.kind, model)
        return
    names = {side: model.name_of(side) for side in model.sides}
    for name in dict.fromkeys(names.values()):
        save_encoder(folder / name, model.encoder(name))
    values = {"sides": names, "embedding_size": model.embedding_size, "has_bias": model.logit_bias is not None}
    _write(folder / _BOTH, values)


def open_dual_encoder(folder: Path | str, *, trust: bool = False) -> DualEncoder:
    """Build the dual encoder that `save_encoders` has written, with random weights; see `open_encoder`."""
    folder = Path(folder)
    values = _read(folder / _BOTH)
    try:
        options_of(folder / _BOTH, model=vars(ModelConfig(embedding_size=values["embedding_size"])))
        strangers = {*values["sides"], *values["sides"].values()} - {*SIDES}
        if strangers or len(values["sides"]) != 2:
            raise TypeError(f"it must name two sides of {', '.join(SIDES)}, got {shown(values['sides'])}")
        encoders = {name: open_encoder(folder / name, trust=trust) for name in dict.fromkeys(values["sides"].values())}
        return DualEncoder(
            {side: encoders[name] for side, name in values["sides"].items()},
            embedding_size=values["embedding_size"],
            initial_logit_scale=1.0,
            bias=values["has_bias"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / _BOTH} is not of this version: {error}") from error


def digest_of(folder: Path) -> str:
    """Return a digest of names and contents of the files that build a run's encoders."""
    hasher = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()):
        name = path.relative_to(folder)
        with open_regular(path) as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        hasher.update(json.dumps([name.as_posix(), digest]).encode())
    return hasher.hexdigest()


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({"format": _FORMAT, **values}, indent=2) + "\n")


def _read(path: Path) -> dict[str, Any]:
    try:
        values = dict(parse_json(read_bounded(path, _MOST_BYTES), str(path)))
    except FileNotFoundError as error:
        raise UserError(f"{str(path.parent)!r} holds no encoder: there is no {path.name}") from error
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if values.pop("format", None) != _FORMAT:
        raise UserError(f"{path} is not an encoder of this version")
    return values
