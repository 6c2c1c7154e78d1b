"""Python lines that use a run's weights without this package, and the files that they need beside torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from ..encoders.saved import FOLDER

_SOURCES = ("encoders/networks.py", "encoders/words.py", "data/pictures.py")


class Lines(NamedTuple):
    """The lines of one side."""

    imports: list[str]
    load: list[str]
    use: list[str]
    """They compute `NAME`, a row for each item."""
    packages: tuple[str, ...]


def copy_sources(run: Path) -> None:
    """Copy the files that need torch, numpy and Pillow alone into the folder of the encoders."""
    package = Path(__file__).parents[1]
    for source in _SOURCES:
        shutil.copyfile(package / source, run / FOLDER / Path(source).name)


def plain_program(run: Path, task: str, path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a program that embeds an item of each side, and the packages that it needs.

    Args:
        run: the folder of a run that has been finished.
        task: the task of the run.
        path: the folder as the program names it.

    Returns:
        "" where an encoder of the run is one that a few lines cannot build.
    """
    is_dual = task == "retrieve"
    sides = json.loads((run / FOLDER / "encoders.json").read_text())["sides"] if is_dual else {"image": "image"}
    parts = []
    for side, name in sides.items():
        prefix = f"{name}." if is_dual else ""
        found = _lines(run / FOLDER / name, f"{FOLDER}/{name}", side, name, prefix, is_first=side == name)
        if found is None:
            return "", ()
        parts.append(found)
    lines = [*([] if is_dual else ["import json"]), "import sys", "from pathlib import Path", "", "import torch"]
    lines += [
        *([] if is_dual else ["from safetensors import safe_open"]),
        "from safetensors.torch import load_file",
        "",
    ]
    lines += [f"run = Path({str(path)!r})"]
    lines += ['sys.path.insert(0, str(run / "encoders"))  # networks.py, pictures.py and words.py need no wholebatch']
    lines += [*dict.fromkeys(each for part in parts for each in part.imports), ""]
    lines += ['weights = load_file(run / "model.safetensors")', *(each for part in parts for each in part.load), ""]
    lines += ["with torch.no_grad():", *(f"    {each}" for part in parts for each in part.use)]
    projected = _names(run)
    for side, name in sides.items():
        if f"projections.{name}.weight" in projected:
            lines += [f'    {side} = {side} @ weights["projections.{name}.weight"].T']
        lines += [f"    {side} = torch.nn.functional.normalize({side}, dim=-1)"]
    lines += _similarities(*sides) if is_dual else _CLASSES
    packages = dict.fromkeys(["torch", "safetensors", *(each for part in parts for each in part.packages)])
    return "\n".join(lines) + "\n", tuple(packages)


def _similarities(one: str, other: str) -> list[str]:
    return [f"print({one} @ {other}.T)  # similarities: a row for each {one}, a column for each {other}"]


_CLASSES = [
    '    classes = json.loads(safe_open(run / "model.safetensors", "pt").metadata()["classes"])',
    '    centers = weights["centers"].view(len(classes), -1, image.shape[1])',
    "    centers = torch.nn.functional.normalize(centers, dim=-1)",
    "    best = (centers @ image.T).amax(1).argmax(0)  # of each image",
    "print([classes[number] for number in best.tolist()])",
]


def _names(run: Path) -> set[str]:
    from ..._tensor_file import TensorFile

    with TensorFile(run / "model.safetensors") as file:
        return set(file.entries)


def _lines(folder: Path, shown: str, side: str, name: str, prefix: str, *, is_first: bool) -> Lines | None:
    """Return the lines of a side whose encoder is in `folder`; `is_first`: it is not that of the side before."""
    values: dict[str, Any] = json.loads((folder / "encoder.json").read_text())
    made = {
        "small image": _small_image,
        "small text": _small_text,
        "transformers text": _transformers_text,
        "timm image": _timm_image,
    }.get(values["form"])
    found = made(values, folder, shown, side, name, prefix) if made else None
    return found._replace(load=[]) if found and not is_first else found


def _weights(network: str, prefix: str) -> str:
    """Return the line that gives a network the weights of its prefix."""
    cut = f"name.removeprefix({prefix!r})" if prefix else "name"
    of = f" if name.startswith({prefix!r})" if prefix else ' if name != "centers"'
    return f"{network}.load_state_dict({{{cut}: x for name, x in weights.items(){of}}})"


def _small_image(values: dict[str, Any], _: Path, __: str, side: str, name: str, prefix: str) -> Lines:
    sizes, size, channels = values["sizes"], values["image_size"], values["channels"]
    mode = "L" if channels == 1 else "RGB"
    arguments = (
        f"channels={channels}, image_size={size}, width={sizes['image_width']}, "
        f"embedding_size={sizes['embedding_size']}"
    )
    return Lines(
        [
            "import numpy",
            "from networks import ImageNetwork",
            "from pictures import open_picture",
            "from PIL import ImageOps",
        ],
        [f"{name}_encoder = ImageNetwork({arguments})", _weights(f"{name}_encoder", prefix)],
        [
            f'pictures = [open_picture(Path(name)).convert({mode!r}) for name in ["picture.png"]]',
            f"pixels = numpy.stack([ImageOps.pad(picture, ({size}, {size})) for picture in pictures])",
            f"pixels = torch.from_numpy(pixels).view(-1, {size}, {size}, {channels}).permute(0, 3, 1, 2)",
            f"{side} = {name}_encoder(pixels)",
        ],
        ("numpy", "pillow"),
    )


def _small_text(values: dict[str, Any], _: Path, __: str, side: str, name: str, prefix: str) -> Lines:
    sizes = values["sizes"]
    arguments = (
        f"buckets={sizes['text_buckets']}, max_words={sizes['max_words']}, width={sizes['text_width']}, "
        f"layers={sizes['text_layers']}, heads={sizes['text_heads']}, embedding_size={sizes['embedding_size']}"
    )
    tokens = f"max_words={sizes['max_words']}, buckets={sizes['text_buckets']}"
    return Lines(
        ["from networks import TextNetwork", "from words import tokenize"],
        [f"{name}_encoder = TextNetwork({arguments})", _weights(f"{name}_encoder", prefix)],
        [f'{side} = {name}_encoder(tokenize(["a few words"], {tokens}))'],
        (),
    )


def _transformers_text(
    values: dict[str, Any], folder: Path, shown: str, side: str, name: str, prefix: str
) -> Lines | None:
    config = json.loads((folder / "config.json").read_text())
    if values["rule"] is None or "text_config" in config or config.get("is_encoder_decoder") or values["lower"]:
        return None
    pooled = {
        "mean": f"{side} = (tokens * mask).sum(1) / mask.sum(1)",
        "cls": f"{side} = tokens[:, 0]",
        "last": f"{side} = tokens[torch.arange(len(tokens)), mask[..., 0].sum(1) - 1]",
    }[values["rule"]]
    return Lines(
        ["from transformers import AutoConfig, AutoModel, AutoTokenizer"],
        [
            f'{name}_tokenizer = AutoTokenizer.from_pretrained(run / "{shown}", padding_side="right")',
            f'{name}_encoder = AutoModel.from_config(AutoConfig.from_pretrained(run / "{shown}")).float().eval()',
            _weights(f"{name}_encoder", prefix + "model."),
        ],
        [
            f'inputs = {name}_tokenizer(["a few words"], padding=True, truncation=True, '
            f'max_length={values["max_tokens"]}, return_tensors="pt")',
            f'tokens, mask = {name}_encoder(**inputs).last_hidden_state, inputs["attention_mask"][..., None]',
            pooled,
        ],
        ("transformers",),
    )


def _timm_image(values: dict[str, Any], _: Path, __: str, side: str, name: str, prefix: str) -> Lines:
    arguments = "".join(f", {key}={x!r}" for key, x in values["arguments"].items())
    mode = "L" if values["data"]["input_size"][0] == 1 else "RGB"
    data = {key: tuple(x) if isinstance(x, list) else x for key, x in values["data"].items()}
    return Lines(
        ["import timm", "from pictures import open_picture"],
        [
            f"{name}_encoder = timm.create_model({values['model']!r}{arguments}, num_classes=0).eval()",
            _weights(f"{name}_encoder", prefix + "model."),
            f"transform = timm.data.create_transform(**{data!r})",
        ],
        [
            f'pixels = [transform(open_picture(Path(name)).convert({mode!r})) for name in ["picture.png"]]',
            f"{side} = {name}_encoder(torch.stack(pixels))",
        ],
        ("timm", "numpy", "pillow"),
    )
