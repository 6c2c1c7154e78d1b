"""The encoders of a run in plain PyTorch, without wholebatch: this file is copied into its folder, as `model.py`.

It needs torch and safetensors, numpy and Pillow for pictures, timm or transformers for their encoders; nothing is
unpickled. Call `embed_image`, `embed_text`, `embed_query` or `embed_document`, whichever sides the run has, with one
item or many: they return unit features, a row for each. `classify` names the classes of pictures.
"""

# mypy: ignore-errors

import json
import sys
from functools import cache, partial
from pathlib import Path

import torch

_RUN = Path(__file__).parent
_WEIGHTS = _RUN / "model.safetensors"
_PART = 256  # items that are embedded at a time


def __getattr__(function):
    names = _names()
    if function not in names:
        raise AttributeError(f"this run has {', '.join(names)} and classify, not {function}")
    return partial(_embed, names[function])


@cache
def _names():
    """Return the name of the encoder that each function uses; of one encoder there is no file about both."""
    both = _RUN / "encoders" / "encoders.json"
    sides = json.loads(both.read_text())["sides"] if both.exists() else {"image": ""}
    return {f"embed_{side}": name for side, name in sides.items()}


@cache
def _weights():
    from safetensors.torch import load_file

    return load_file(_WEIGHTS)


def _small_image(values, _, state):
    import numpy
    from networks import ImageNetwork
    from PIL import ImageOps

    sizes, size, channels = values["sizes"], values["image_size"], values["channels"]
    network = ImageNetwork(
        channels=channels, image_size=size, width=sizes["image_width"], embedding_size=sizes["embedding_size"]
    )
    network.load_state_dict(state)

    def features(paths):
        pictures = [ImageOps.pad(_open(path, channels), (size, size)) for path in paths]
        pixels = torch.from_numpy(numpy.stack(pictures))
        return network(pixels.view(-1, size, size, channels).permute(0, 3, 1, 2))

    return features


def _small_text(values, _, state):
    from networks import TextNetwork
    from words import tokenize

    sizes = values["sizes"]
    tokens = {"buckets": sizes["text_buckets"], "max_words": sizes["max_words"]}
    network = TextNetwork(
        **tokens, width=sizes["text_width"], layers=sizes["text_layers"], heads=sizes["text_heads"],
        embedding_size=sizes["embedding_size"],
    )  # fmt: skip
    network.load_state_dict(state)
    return lambda texts: network(tokenize(texts, **tokens))


def _transformers_text(values, folder, state):
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="right")
    network = AutoModel.from_config(AutoConfig.from_pretrained(folder)).float().eval()
    network.load_state_dict({name.removeprefix("model."): x for name, x in state.items()})
    cut = {"padding": True, "truncation": True, "max_length": values["max_tokens"], "return_tensors": "pt"}

    def features(texts):
        inputs = tokenizer([*texts], **cut)
        tokens, mask = network(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
        if values["rule"] == "mean":
            return (tokens * mask).sum(1) / mask.sum(1)
        return tokens[torch.arange(len(tokens)), 0 if values["rule"] == "cls" else mask[..., 0].sum(1) - 1]

    return features


def _timm_image(values, _, state):
    import timm

    network = timm.create_model(values["model"], **values["arguments"], num_classes=0).eval()
    network.load_state_dict({name.removeprefix("model."): x for name, x in state.items()})
    data = {name: tuple(x) if isinstance(x, list) else x for name, x in values["data"].items()}
    transform = timm.data.create_transform(**data)
    return lambda paths: network(torch.stack([transform(_open(path, data["input_size"][0])) for path in paths]))


_MADE = {
    "small image": _small_image, "small text 2": _small_text, "transformers text": _transformers_text,
    "timm image": _timm_image,
}  # fmt: skip


def _open(path, channels):
    """Read a picture; an error names it."""
    from pictures import open_picture

    try:
        return open_picture(Path(path)).convert("L" if channels == 1 else "RGB")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


@cache
def _encoder(name):
    folder, prefix = _RUN / "encoders" / (name or "image"), f"{name}." if name else ""
    if str(folder.parent) not in sys.path:
        sys.path.insert(0, str(folder.parent))  # networks.py, pictures.py and words.py are there
    values = json.loads((folder / "encoder.json").read_text())
    own = {key.removeprefix(prefix): x for key, x in _weights().items() if key.startswith(prefix) and key != "centers"}
    return _MADE[values["form"]](values, folder, own)


@torch.no_grad()
def _embed(name, items):
    items = [items] if isinstance(items, (str, Path)) else [*items]
    features = torch.cat([_encoder(name)(items[start : start + _PART]) for start in range(0, len(items), _PART)])
    projection = _weights().get(f"projections.{name}.weight")
    return torch.nn.functional.normalize(features if projection is None else features @ projection.T, dim=-1)


def classify(paths):
    """Return the class of each of these pictures, by the classifier of a run of --task identify."""
    from safetensors import safe_open

    classes = json.loads(safe_open(_WEIGHTS, "pt").metadata()["classes"])
    features = _embed("", paths)
    centers = _weights()["centers"].view(len(classes), -1, features.shape[1])  # a class may have several
    best = (torch.nn.functional.normalize(centers, dim=-1) @ features.T).amax(1).argmax(0)
    return [classes[number] for number in best.tolist()]
