"""Lines of Python that build an encoder of a run, load its weights and embed items with it, without this package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple


class PlainEncoder(NamedTuple):
    """The lines of one encoder."""

    imports: list[str]
    load: list[str]
    use: list[str]
    """They compute `features`, a row for each of `paths`, or `texts`."""
    packages: tuple[str, ...]


def plain_encoder(folder: Path, name: str, prefix: str) -> PlainEncoder | None:
    """Return the lines of the encoder of this name, which is in `folder`; None of one that takes too many."""
    values: dict[str, Any] = json.loads((folder / "encoder.json").read_text())
    made = {
        "small image": _small_image,
        "small text 2": _small_text,
        "transformers text": _transformers_text,
        "timm image": _timm_image,
    }.get(values["form"])
    return made(values, folder, name, prefix) if made else None


def _weights(network: str, prefix: str) -> str:
    """Return the line that gives a network the weights of its prefix."""
    cut = f"name.removeprefix({prefix!r})" if prefix else "name"
    of = f" if name.startswith({prefix!r})" if prefix else ' if name != "centers"'
    return f"{network}.load_state_dict({{{cut}: x for name, x in weights.items(){of}}})"


def _small_image(values: dict[str, Any], _: Path, name: str, prefix: str) -> PlainEncoder:
    sizes, size, channels = values["sizes"], values["image_size"], values["channels"]
    mode = "L" if channels == 1 else "RGB"
    arguments = (
        f"channels={channels}, image_size={size}, width={sizes['image_width']}, "
        f"embedding_size={sizes['embedding_size']}"
    )
    return PlainEncoder(
        [
            "import numpy",
            "from networks import ImageNetwork",
            "from pictures import open_picture",
            "from PIL import ImageOps",
        ],
        [f"{name}_encoder = ImageNetwork({arguments})", _weights(f"{name}_encoder", prefix)],
        [
            f"pictures = [opened(name, {mode!r}) for name in paths]",
            f"pixels = numpy.stack([ImageOps.pad(picture, ({size}, {size})) for picture in pictures])",
            f"pixels = torch.from_numpy(pixels).view(-1, {size}, {size}, {channels}).permute(0, 3, 1, 2)",
            f"features = {name}_encoder(pixels)",
        ],
        ("numpy", "pillow"),
    )


def _small_text(values: dict[str, Any], _: Path, name: str, prefix: str) -> PlainEncoder:
    sizes = values["sizes"]
    arguments = (
        f"buckets={sizes['text_buckets']}, max_words={sizes['max_words']}, width={sizes['text_width']}, "
        f"layers={sizes['text_layers']}, heads={sizes['text_heads']}, embedding_size={sizes['embedding_size']}"
    )
    tokens = f"max_words={sizes['max_words']}, buckets={sizes['text_buckets']}"
    return PlainEncoder(
        ["from networks import TextNetwork", "from words import tokenize"],
        [f"{name}_encoder = TextNetwork({arguments})", _weights(f"{name}_encoder", prefix)],
        [f"features = {name}_encoder(tokenize(texts, {tokens}))"],
        (),
    )


def _transformers_text(values: dict[str, Any], folder: Path, name: str, prefix: str) -> PlainEncoder | None:
    config = json.loads((folder / "config.json").read_text())
    if values["rule"] is None or "text_config" in config or config.get("is_encoder_decoder") or values["lower"]:
        return None
    pooled = {
        "mean": "features = (tokens * mask).sum(1) / mask.sum(1)",
        "cls": "features = tokens[:, 0]",
        "last": "features = tokens[torch.arange(len(tokens)), mask[..., 0].sum(1) - 1]",
    }[values["rule"]]
    return PlainEncoder(
        ["from transformers import AutoConfig, AutoModel, AutoTokenizer"],
        [
            f'{name}_tokenizer = AutoTokenizer.from_pretrained(run / "encoders/{name}", padding_side="right")',
            f'{name}_config = AutoConfig.from_pretrained(run / "encoders/{name}")',
            f"{name}_encoder = AutoModel.from_config({name}_config).float().eval()",
            _weights(f"{name}_encoder", prefix + "model."),
        ],
        [
            f"inputs = {name}_tokenizer([*texts], padding=True, truncation=True, "
            f'max_length={values["max_tokens"]}, return_tensors="pt")',
            f'tokens, mask = {name}_encoder(**inputs).last_hidden_state, inputs["attention_mask"][..., None]',
            pooled,
        ],
        ("transformers",),
    )


def _timm_image(values: dict[str, Any], _: Path, name: str, prefix: str) -> PlainEncoder:
    arguments = "".join(f", {key}={x!r}" for key, x in values["arguments"].items())
    mode = "L" if values["data"]["input_size"][0] == 1 else "RGB"
    data = {key: tuple(x) if isinstance(x, list) else x for key, x in values["data"].items()}
    return PlainEncoder(
        ["import timm", "from pictures import open_picture"],
        [
            f"{name}_encoder = timm.create_model({values['model']!r}{arguments}, num_classes=0).eval()",
            _weights(f"{name}_encoder", prefix + "model."),
            f"{name}_transform = timm.data.create_transform(**{data!r})",
        ],
        [
            f"pixels = [{name}_transform(open_picture(Path(name)).convert({mode!r})) for name in paths]",
            f"features = {name}_encoder(torch.stack(pixels))",
        ],
        ("timm", "numpy", "pillow"),
    )
